"""The guarantees of ddp_reference.py, and the command that tries them on your own job.

    bash run.sh test                 # all tests; also: python -m pytest test_ddp_reference.py
    bash run.sh test -k Lesson       # only the lessons
    bash run.sh check my_job.py      # is this job the same on any number of processes?

First come seven lessons: what data-parallel training needs, and what ddp_reference.py guarantees.
The docstring of that file explains the words, such as rank, global batch and all-reduce. Each
lesson compares what ranks do with something simpler, such as PyTorch's sampler or one process that
has the whole batch. (Nets and losses are compared up to rounding, because ranks add the same
numbers in another order.)

"To break it" names a line of ddp_reference.py (in Lesson 0, of this file). Cover the lines below it
and predict what they say. Then change the line, run, for example, `bash run.sh test -k Lesson3`,
and undo the change. Ask each time: would a job with this fault have ended with an error? Would a
test of a single rank see it? Where both answers are no, a test must look at several ranks, and
nearly always compare them with one process. If a test fails in a rank, read from the last
"Traceback" on.

After the lessons come the other guarantees, in the order of the chapters of ddp_reference.py, then
the README, the processes, and the command `check`. The tests need chapter 1 of ddp_reference.py as
it is. If you edit it, run them on an unedited copy, and check your own job with `check`.
"""

import contextlib
import io
import logging
import os
import pathlib
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from functools import cache, partial
from itertools import product
from typing import NamedTuple
from unittest import TestCase, mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, default_collate
from torch.utils.data import DistributedSampler as TorchSampler

import ddp_reference as ddp

HERE = pathlib.Path(__file__).resolve().parent
README = HERE / "README.md"
os.environ |= {
    "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or torchrun's restarts may hang
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # Counting GPUs must not start CUDA: ranks are forked.
}
GPUS = torch.cuda.device_count()
needs_readme = unittest.skipUnless(README.exists(), "README.md is not beside this file.")


def setUpModule():
    """Work in an empty folder, and start what takes long, so that it runs beside the other tests.

    With -k, a test starts what it needs.
    """
    if not __debug__:
        raise RuntimeError("PYTHONOPTIMIZE or -O turns the assertions of these tests off: unset it")
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    unittest.addModuleCleanup(os.chdir, HERE)
    os.chdir(folder.name)
    os.environ["TMPDIR"] = folder.name  # Programs that are killed leave files there.
    logging.disable()  # PyTorch would log each rank that it ends.
    if "-k" not in sys.argv:
        start_slow_programs()


# ---- Lesson 0: the machine (torch.distributed)
# Can this machine add? Lessons 3 to 6 rest on the all-reduce, which gives every rank the sum of all
# ranks' tensors. If some numbers are wrong, in training this passes for noise. Sums of integers are
# exact, so here a single wrong one shows.
#
# There are as many ranks as GPUs, or two on the CPU. Rank 0 makes the list 0, 1, 2 and so on, rank
# 1 makes 1, 2, 3 and so on. With two ranks the sums must be 1, 3, 5 and so on: i + (i + 1) at index
# i. With W ranks they must be W * i + (0 + 1 + ... + W - 1). Each rank prints how fast this was
# (with pytest, add -s). If the ranks hang, the test fails after a minute or so, and each rank
# prints where it waits.
#
# A single GPU has nothing to add up, so there the test passes even without the all-reduce. On such
# a machine use two ranks on the CPU: `CUDA_VISIBLE_DEVICES= bash run.sh test -k Lesson0`.
#
# In the code, run_job() starts the ranks, and each calls add_up_integers() in place of train(). How
# it works stands under "Helpers". You can read on without it.
#
# To break it, leave out `dist.all_reduce(total)` below, in this file.
# Then each rank keeps its own list, and the test stops at the list of 1 MB: all its 262144 integers
# are wrong. (On rank 1 of 2 all but the one at i = 0, where its own number, 1, is also the sum.)
#
# To break it in another way, put `total[7] += rank` below the line `dist.all_reduce(total)`.
# Then rank 1 has one wrong number, and the message says so: 1 of 262144. (So has each later rank.)
# In a gradient nobody would notice it.
def add_up_integers(train, args, device):
    """On a rank: all-reduce integers, and compare each with the sum that it must be."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    for megabytes in (1, 64, 64):  # NCCL connects at each first use, so the last one is timed.
        # 2**18 integers of 4 bytes are a megabyte.
        integers = torch.arange(megabytes * 2**18, dtype=torch.int32, device=device)
        total = integers + rank
        expected = world_size * integers + sum(range(world_size))
        began = time.perf_counter()
        dist.all_reduce(total)
        wrong = (total != expected).sum().item()
        # On a GPU only .item() waits for the sum, so the clock is read after it. The comparison is
        # timed, too, so the true rate is higher than the printed one.
        seconds = time.perf_counter() - began
        assert not wrong, f"{wrong} of {len(total)} integers are wrong on rank {rank}, {device}"
    print(f"rank {rank} of {world_size} added up 64 MB, at least {64 / seconds:.0f} MB/s, {device}")


class Lesson0Machine(TestCase):
    def test_all_ranks_add_up_integers_exactly(self):
        """1 MB and 64 MB are added up over all GPUs, or over two ranks on the CPU."""
        # main() wants a global batch that the ranks share equally, though no batch is read here.
        print(*run_job(GPUS or 2, f"--global-batch-size {GPUS or 2}", train=add_up_integers))


# ---- Lesson 1: which samples a rank reads (DistributedSampler)
# A step has the same samples on any number of ranks.
#
# All ranks draw the same order of the samples, because each seeds its shuffle with the same number,
# --seed plus the epoch. Of W ranks, rank r reads the positions r, r + W, r + 2W and so on of this
# order, in batches of B / W, where B is the global batch size. With B = 4 and W = 2, rank 0 reads
# the positions 0, 2 and then 4, 6, while rank 1 reads 1, 3 and then 5, 7. So the first step has the
# positions 0 to B - 1, the second one B to 2B - 1, and so on, for every W that divides B.
#
# A job that was stopped after k steps goes on with set_epoch(epoch, samples_read=k * B). Its ranks,
# whose number may have changed, share the rest of the order. PyTorch's sampler cannot do this, so
# we have our own.
#
# A sampler is told its rank, so here one process plays all ranks. The first test puts together what
# they read in each step, and compares it with the order of PyTorch's sampler for a single rank.
# (Both are sorted, because within a step the order does not matter.)
#
# To break it, leave out `+ self.rank` in DistributedSampler.
# Then all ranks read the samples of rank 0, and with two ranks the message shows each of them
# twice. The second test fails, too.
#
# To break it in another way, replace `self.seed + self.epoch` by `self.seed + self.rank` there.
# Then each rank has an order of its own, so some samples are read twice, and others never. One rank
# passes, and nothing shows it in a job: the main job ends at 0.9357 in place of 0.9358.
class Lesson1Sampler(TestCase):
    def test_a_step_has_the_same_samples_on_any_number_of_ranks(self):
        """In each step the ranks read the next 12 samples of one order, also after a stop."""
        dataset = range(24)
        order = list(TorchSampler(dataset, num_replicas=1, rank=0))
        for world_size, steps_done in product(range(1, 5), (0, 1)):
            # An epoch has two steps. After a stop only the second one is left.
            expected = [sorted(order[:12]), sorted(order[12:])][steps_done:]
            loaders = []
            for rank in range(world_size):
                sampler = ddp.DistributedSampler(dataset, world_size, rank)
                sampler.set_epoch(0, samples_read=12 * steps_done)
                loaders.append(DataLoader(dataset, 12 // world_size, sampler=sampler))

            # zip() takes a batch of each rank. Together they are a step.
            read = [sorted(torch.cat(batches).tolist()) for batches in zip(*loaders)]
            assert read == expected, f"{world_size=}, {steps_done=}: {read}, not {expected}"
            assert len(loaders[0]) == len(read)  # A loader must know how many steps are left.

    def test_indices_and_attributes_are_those_of_pytorchs_sampler(self):
        """Ours takes PyTorch's place: the same arguments, indices and attributes.

        This is about compatibility. You can skip it at first.
        """
        # To save memory our permutation is of int32. It must agree with PyTorch's of int64, also
        # for 70000 samples, which 16 bits could not count.
        for num_samples, num_replicas, shuffle, drop_last in product(
            (*range(20), 70000), range(1, 7), (True, False), (True, False)
        ):
            for rank in range(num_replicas):
                # All arguments of the samplers in their order. The seed is 7.
                arguments = range(num_samples), num_replicas, rank, shuffle, 7, drop_last
                ours = ddp.DistributedSampler(*arguments)
                theirs = TorchSampler(*arguments)

                # Compare texts: np.int32(3) equals 3, but prints differently. Ours must be ints.
                assert f"{list(ours)}" == f"{list(theirs)}", f"the indices differ for {arguments}"
                # Each attribute of PyTorch's sampler is also one of ours, with the same value.
                assert vars(theirs).items() <= vars(ours).items(), f"{vars(theirs)}, {vars(ours)}"


# ---- Lesson 2: seven experiments (DistributedSampler)
# A job can read the wrong samples without an error.
#
# Two ranks read for two epochs, each in batches of 4. A row of the table says what is special: "no
# sampler" (then the DataLoader does not shuffle), "set_epoch" (it is called before each epoch) or
# "drop_last" (an option of the DataLoader, not of the sampler). Then it shows what rank 0 reads and
# what rank 1 reads: "4730 6, 4730 6" are two batches in epoch 0, and the same two in epoch 1.
# PyTorch's sampler and ours read the same. Which of these faults does each row show?
# A. All ranks read the same samples, so a second rank is of no use.
# B. Each epoch has the same order. (Judge this in 1 to 3 only: the others are about remainders.)
# C. In an epoch some samples are never read.
# D. In an epoch some samples are read twice and the others once, so they weigh more.
# E. A rank has fewer than 4 samples in a step, so the step is noisier, and each sample weighs more.
# One row shows none. The answers are in the README, under "Which samples a rank reads".
#
# Where the samples do not come out even, one must choose. make_loaders() chooses C: it drops the
# last samples, and train() calls set_epoch(), so that they are others in each epoch.
#
# To break it, replace `self.seed + self.epoch` by `self.seed` in DistributedSampler.
# Then epoch 1 of experiment 3 has the order of epoch 0. (Lesson 1 does not see this, because it
# stays in epoch 0.)
#
# To break it in another way, leave out `self.was_read = False` in set_epoch().
# Then the sampler cries wolf: it warns in experiment 3, too, where each epoch has its own order.
EXPERIMENTS = (
    ("1. 8 samples, no sampler", "0123 4567, 0123 4567", "0123 4567, 0123 4567"),
    ("2. 8 samples", "4721, 4721", "0356, 0356"),
    ("3. 8 samples, set_epoch", "4721, 5271", "0356, 4630"),
    ("4. 6 samples", "231, 231", "504, 504"),
    ("4. 6 samples, drop_last", "-, -", "-, -"),
    ("5. 5 samples", "412, 412", "034, 034"),
    ("5. 5 samples, set_epoch", "412, 021", "034, 430"),
    ("6. 10 samples", "4730 6, 4730 6", "1598 2, 1598 2"),
    ("7. 10 samples, drop_last", "4730, 4730", "1598, 1598"),
)


def read_two_epochs(setting, sampler_class, rank):
    """Do an experiment: return what a rank of two reads, as in the table."""
    dataset = range(int(setting.split()[1]))
    sampler = None if "no sampler" in setting else sampler_class(dataset, 2, rank)
    loader = DataLoader(dataset, 4, sampler=sampler, drop_last="drop_last" in setting)
    epochs = []
    for epoch in range(2):
        if "set_epoch" in setting:
            sampler.set_epoch(epoch)
        batches = ["".join(map(str, batch.tolist())) for batch in loader]
        epochs.append(" ".join(batches) or "-")
    return ", ".join(epochs)


class Lesson2Experiments(TestCase):
    def test_both_samplers_read_what_the_table_shows(self):
        """Ours also warns where an order is read twice, as in experiment 2, and nowhere else."""
        for sampler_class, (setting, *shown) in product(
            (TorchSampler, ddp.DistributedSampler), EXPERIMENTS
        ):
            with mock.patch("warnings.warn") as warn:
                read = [read_two_epochs(setting, sampler_class, rank) for rank in range(2)]

            assert read == shown, f"{sampler_class}, {setting}: it reads {read}, not {shown}"
            is_ours = sampler_class is ddp.DistributedSampler
            is_same_order = "set_epoch" not in setting and "no sampler" not in setting
            assert warn.called == (is_ours and is_same_order), f"{sampler_class}, {setting}"


# ------------------------------------------------------------------------------------------------
# Helpers. To follow the lessons you need only this comment.
# - run_job(3, options) runs a job on three ranks, and returns what each has printed. It raises an
#   exception if a rank does. With train=function, each rank calls function(train, args, device) in
#   place of train(args, device). So with any name of ddp_reference: the function gets the original
#   first, and can call it.
# - SMALL are the options of a small job. If an option is given twice, the later one counts.
# - (For Lesson 6.) net_after(options, [Run(4, stop_after=0.5), Run(2)]) returns the net of a job
#   that is stopped on four ranks after half an epoch, and goes on with two. In the first epoch its
#   learning rates grow, by warm_up().
# - share(x) is the part of x that this rank has: every world_size-th item, as in Lesson 1.
# - whole_batch(dataset) is one batch of all samples.
# - The samples of Ragged have unequally many labels, and plain_net() has no BatchNorm.
# - assert_close(a, b, sentence) compares numbers or tensors up to rounding. If they differ, the
#   message ends with the sentence.
# Go on at Lesson 3, and come back when you want to know how they work.
def be_rank(rank, world_size, port, options, replacements):
    """Be one rank of a job: run main() as if torchrun had started this process."""
    mp.set_start_method(None, force=True)  # The forkserver has set it, but torchrun would not.
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # TF32 rounds more than a CPU.
    os.environ |= {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{world_size}",
        "LOCAL_RANK": f"{world_size - 1 - rank}",  # Reversed, so that taking it for RANK fails.
        "LOCAL_WORLD_SIZE": f"{world_size}",
        # The store of run_job(), by which the ranks find each other.
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": f"{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, function in replacements.items():
        setattr(ddp, name, partial(function, getattr(ddp, name)))
    sys.argv = ["ddp_reference.py", *f"--timeout 60 {options}".split()]
    with open(f"rank{rank}", "w") as out, contextlib.redirect_stdout(out):
        ddp.main()
    assert not dist.is_initialized(), "the process group was not destroyed"


def run_job(world_size, options="", **replacements):
    """Run a job on so many ranks: return what each rank printed.

    replacements: make_task=f has each rank call f(make_task, ...) in place of make_task(...). The
    function must stand at the top level of a file, because it is pickled. If a rank raises, as by
    an assertion, the others are ended, and this function raises mp.ProcessRaisedException.
    """
    # The ranks are forked from a process that has done the slow imports. One of them is
    # torch._dynamo, which otherwise each rank would import with its first optimizer.
    mp.set_forkserver_preload(["ddp_reference", "torch._dynamo"])
    # The ranks find each other by a store. The port is opened here, because a store that opens its
    # own listens on all networks.
    server = socket.create_server(("localhost", 0))
    port = server.getsockname()[1]
    store = dist.TCPStore("localhost", port, is_master=True, master_listen_fd=server.detach())
    arguments = world_size, store.port, options, replacements
    mp.start_processes(be_rank, arguments, world_size, start_method="forkserver")
    return [pathlib.Path(f"rank{rank}").read_text() for rank in range(world_size)]


class Run(NamedTuple):
    """A run of a job: its ranks, the epochs after which it is stopped, and its loader workers."""

    ranks: int
    stop_after: float = np.inf
    num_workers: int = 0


def warm_up(args, epochs_done):
    """Return a factor that grows during the first epoch. A number of NumPy must do, too."""
    return np.float64(min(1, epochs_done + 0.1))


def stop_at(stop_after, lr_factor, args, epochs_done):
    """In place of lr_factor(): warm up, and end like a killed process after so many epochs."""
    if epochs_done >= stop_after:
        os._exit(0)  # With another status run_job() would raise.
    return warm_up(args, epochs_done)


def net_after(options, runs, **replacements):
    """Run a job with warm_up(), in runs that each resume the one before: return the last net."""
    path = f"{tempfile.mkdtemp(dir='.')}/ck"
    for number, run in enumerate(runs):
        replacements["lr_factor"] = partial(stop_at, run.stop_after)
        run_options = f"--num-workers {run.num_workers} --checkpoint {path} --checkpoint-every 1"
        printed, *_ = run_job(run.ranks, f"{options} {run_options}", **replacements)
        assert ("resuming" in printed) == (number > 0), f"only the first run may begin anew: {run}"
    return torch.load(path, map_location="cpu")["net"]


def assert_close(actual, expected, what, tolerance=2e-5):
    """Assert that numbers or tensors are equal, by default up to the rounding of float32.

    what: a sentence that ends the message if they differ.
    """
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance,
        atol=tolerance,
        check_device=False,
        msg=lambda difference: f"{difference}\n{what}",
    )


def whole_batch(dataset):
    """Return all samples of a dataset as one batch."""
    return next(iter(DataLoader(dataset, len(dataset))))


def share(sequence):
    """On a rank: return its share, every world_size-th item, of a sequence that all ranks have."""
    return sequence[dist.get_rank() :: dist.get_world_size()]


class Ragged(ddp.SyntheticDataset):
    """Signals of length 40. Of each, 0, 10, 20, 30 or all 40 labels are ignored: they are -100."""

    def __init__(self, num_samples):
        super().__init__(num_samples, length=40, seed=0)
        for index, y in enumerate(self.tensors[1]):
            y[: index % 5 * 10] = -100


def plain_net():
    """Return a net without BatchNorm, the same in every process.

    One of its parameters is frozen, so it never has a gradient, and a step must skip it. Its buffer
    is there for the count of collectives below: DDP would broadcast it in each step if train() did
    not turn that off.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 1))
    net[0].bias.requires_grad_(False)
    net.register_buffer("unused", torch.zeros(1))
    return net


SMALL = "--num-samples 48 --length 64 --epochs 2 --global-batch-size 12"  # four steps an epoch


# ---- Lesson 3: a step (train_step)
# The mean of the ranks' means is not the mean over all labels, unless all ranks have equally many
# labels.
#
# A step must move the net as one process with the whole batch would, even if ranks have unequally
# many labels (a signal has one for each point, but some are ignored). If each rank took the mean
# over its own labels, as in the usual loop, a label would weigh more on a rank that has few.
# Therefore
# - each rank takes the gradient of the sum of its losses,
# - DDP averages these gradients, which divides their sum by the world size,
# - train_step() multiplies by the world size, and divides by the number of all labels.
#
# For example, let rank 0 have one label, with loss 7, and rank 1 three labels, with loss 3 each.
# The mean is 16 / 4 = 4, but the mean of the two ranks' means is (7 + 3) / 2 = 5. The sums of the
# ranks are 7 and 9, whose average is 8. Times 2 ranks, and divided by 4 labels, this is 4. With
# gradients in place of losses it is the same.
#
# A rank may also compute its share in parts, the micro-batches. backward() adds up their gradients,
# so DDP has to average only once, after the last one.
#
# To break it as the usual loop does, leave out the line `parameter.grad *= factor` (write `pass`),
# and replace `sums[1].backward()` by `(sums[1] / (batch[-1] != -100).sum()).backward()`.
# Then each rank takes the mean over its own labels, and DDP averages the means. All ranks have
# equal nets, and one rank passes. But of two ranks, each of the 140 labels of rank 0 weighs 1/280
# in place of 1/270, and each of the 130 of rank 1 weighs 1/260.
#
# To break it in another way, replace `dist.get_world_size()` by 1 in train_step().
# Then two ranks move each parameter only half as far. The message names a parameter and by how much
# it differs. Yet one rank passes, because it multiplies by 1. With Adam, whose steps hardly depend
# on a factor, the test could miss this, so it uses SGD.
def compare_step(make_net, micro_batch_size, train, args, device):
    """On a rank: train on its share of a batch, and compare with one process that has the batch.

    Lesson 5 uses this, too, with a net that has BatchNorm layers to convert.
    """
    # One process, in plain PyTorch, with the whole batch.
    x, y = whole_batch(Ragged(12))
    expected = make_net()
    F.cross_entropy(expected(x), y).backward()
    torch.optim.SGD(expected.parameters(), lr=1).step()

    # This rank, with its share of the same batch, and an equal net.
    net = ddp.convert_batch_norm(make_net().to(device))  # plain_net() has no BatchNorm.
    optimizer = torch.optim.SGD(net.parameters(), lr=1)
    model = nn.parallel.DistributedDataParallel(net)
    ddp.train_step(model, optimizer, (share(x), share(y)), micro_batch_size)

    what = f"Rank {dist.get_rank()} of {dist.get_world_size()} has a different net from one process"
    assert_close(net.state_dict(), expected.state_dict(), f"{what} ({micro_batch_size=})")


def forget_labels(batch_sums, output, y):
    """In place of batch_sums(): there is no label, which is what -100 means."""
    return batch_sums(output, torch.full_like(y, -100))


class Lesson3Step(TestCase):
    def test_a_step_is_that_of_one_process_with_the_whole_batch(self):
        """Its parameters are equal on 1 to 4 ranks, with uneven labels and micro-batches."""
        for world_size, micro_batch_size in product(range(1, 5), (None, 2)):
            # partial() fixes the first two arguments. Each rank adds the others.
            run_job(world_size, train=partial(compare_step, plain_net, micro_batch_size))

    def test_a_batch_without_labels_leaves_the_net_finite(self):
        """The net is saved, which is refused if it holds a number that is not finite."""
        run_job(2, f"{SMALL} --checkpoint unlabeled", batch_sums=forget_labels)


# ---- Lesson 4: evaluation (evaluate)
# Add up sums over the ranks, and divide only once.
#
# Loss and accuracy must be those of one process with all samples, even if the ranks have unequally
# many (25 samples), and even if some have none (2 samples on 4 ranks). PyTorch's sampler would
# repeat samples, which falsifies the means. Instead each rank adds up its own losses and labels,
# and one all-reduce after the loop adds up those of all ranks.
#
# Within the loop there must be no collective, because ranks may have unequally many batches. Of 25
# samples in batches of 4, rank 0 of 2 has four batches and rank 1 three.
#
# A BatchNorm layer (Lesson 5) evaluates with the running mean and variance of what it saw in
# training. With the option --local-bn each rank has seen only its own samples. All ranks must
# evaluate one net. It is that of rank 0, because rank 0 saves it.
#
# To break it, leave out `dist.all_reduce(total)` in evaluate().
# Then each rank returns the sums of its own samples. The message shows the means of one rank, and
# of one process.
#
# To break it in another way, replace `dist.broadcast(buffer, src=0)` by `pass`.
# Then each rank uses its own statistics, which the test has made unequal, as --local-bn would. As
# the sums of all ranks are added up, the loss is wrong on all ranks, also on rank 0.
def loss_and_accuracy(net, dataset):
    """Return the mean loss and the accuracy over all labels of a dataset, in plain PyTorch."""
    x, y = whole_batch(dataset)
    logits = net.eval()(x)
    accuracy = (logits.argmax(1) == y).sum() / (y != -100).sum()
    return [F.cross_entropy(logits, y).item(), accuracy.item()]


def net_with_batch_norm():
    """Return plain_net() between two BatchNorm layers, of which the first feeds an inplace ReLU."""
    return nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(inplace=True), plain_net(), nn.BatchNorm1d(3))


def compare_evaluation(num_samples, train, args, device):
    """On a rank: evaluate its share of the samples, and compare with one process that has all."""
    expected = loss_and_accuracy(net_with_batch_norm(), Ragged(num_samples))

    net = net_with_batch_norm().to(device)
    # The ranks differ now, as after --local-bn. evaluate() must use the statistics of rank 0.
    net[0].running_mean += dist.get_rank()
    batches = DataLoader(Ragged(num_samples), 4, sampler=share(range(num_samples)))
    sums = ddp.evaluate(net, batches)

    assert not net.training  # evaluate() leaves it in eval mode.
    # The sums are the number of labels, the sum of their losses, and the number of right answers.
    means = (sums[1:] / sums[0]).tolist()
    what = f"Rank {dist.get_rank()} of {dist.get_world_size()} has loss and accuracy {means}"
    assert_close(means, expected, f"{what}, but one process with all samples has {expected}")


class Lesson4Evaluation(TestCase):
    def test_the_means_are_those_of_one_process(self):
        """They are equal on 1 to 4 ranks, even if some ranks have fewer samples or none."""
        for world_size, num_samples in product(range(1, 5), (25, 2)):
            run_job(world_size, train=partial(compare_evaluation, num_samples))


# ---- Lesson 5: BatchNorm over the job (convert_batch_norm)
# If the training is not to depend on the number of ranks, BatchNorm must see the samples of all
# ranks, in the forward and in the backward pass. (DDP alone lets each rank see only its own.)
#
# A BatchNorm layer normalizes by the mean and variance of the samples that it sees. For example,
# let rank 0 have the values 1 and 5, and rank 1 the values 3 and 3. If rank 0 sees only its own, it
# makes -1 and 1 of them. One process sees all four, whose mean is 3 and whose variance is 2, and
# makes about -1.4 and 1.4 of them, and 0 and 0 of the others. After convert_batch_norm() each rank
# sees all four, too, and keeps its own two results.
#
# That is the forward pass. The backward pass needs more, because a value of rank 0 now also changes
# the loss of rank 1. If the 5 becomes 6, the mean becomes 3.25, and the results of rank 1 fall from
# 0 to about -0.14. So the gradient of this value has two parts, one from the loss of each rank.
# Each rank computes the part of its own loss, and sum_over_ranks() adds up the parts. DDP does not
# do this, because the value is not a parameter.
#
# With both passes right, Lesson 3 holds for a net with BatchNorm, but not in micro-batches, because
# a layer sees only one of them at a time.
#
# The second test runs train() itself, which must convert the net. Two ranks have one value per
# channel each. PyTorch refuses to normalize a single value, so if the job ends without an error,
# each layer has seen both.
#
# GPUs use nn.SyncBatchNorm in place of our functions. On a machine that has some, break it on the
# CPU: `CUDA_VISIBLE_DEVICES= bash run.sh test -k Lesson5`.
#
# To break it, leave out `dist.all_reduce(gradient)` in sum_over_ranks().
# Then two ranks differ from one process, with the message of Lesson 3, because each lacks the parts
# from the loss of the other one.
#
# To break it in another way, let sum_over_ranks() return `gradient / dist.get_world_size()`.
# Then the parts are averaged. But DDP also averages the gradients of parameters, and train_step()
# multiplies by the world size only once, so the layers before a BatchNorm get too small a gradient.
class Lesson5BatchNorm(TestCase):
    def test_a_step_of_all_ranks_is_that_of_one_process(self):
        """Parameters and running statistics are equal on 1 to 4 ranks."""
        for world_size in range(1, 5):
            run_job(world_size, train=partial(compare_step, net_with_batch_norm, None))

    def test_two_ranks_with_one_value_each_see_both(self):
        """Such a job ends well. With --local-bn, or on one rank, PyTorch refuses the value."""
        # A signal of length 1 is one value per channel. The last option gets its number below.
        small = f"{SMALL} --length 1 --global-batch-size"
        run_job(2, f"{small} 2")
        for world_size, options in ((2, "2 --local-bn"), (1, "1")):
            with self.assertRaisesRegex(mp.ProcessRaisedException, "more than 1 value per channel"):
                run_job(world_size, f"{small} {options}")


# ---- Lesson 6: the number of ranks, and stops (train)
# The number of ranks changes the time, and not the training.
#
# A whole job must end with the net of a loop in plain PyTorch. Read plain_loop() first. It is one
# process, computes each batch as a whole, never resumes, and saves only the net that it ends with.
#
# The job has augmentation, a warm-up, clipping, uneven labels and a learning rate for each
# parameter. It runs on 1 rank, on 2 with loader workers, on 3 and on 4. Then a job starts on 4
# ranks, is stopped, goes on with 3, is stopped again, and ends with 2. All of this is done once
# more in micro-batches, with a net that has no BatchNorm (see Lesson 5). The net is equal because
# - the samples of a step (Lesson 1), its gradient (3) and BatchNorm (5) do not depend on the number
#   of ranks,
# - the random numbers of an item follow from the seed, the epoch and the index, whichever rank
#   reads it,
# - the learning rate follows from the samples that were read, and not from the steps of a run,
# - the checkpoint holds the rest: the net, the optimizer with its momentum, and how far the job has
#   read.
#
# Not in this test are the exceptions: dropout, whose masks each rank draws itself, and BatchNorm
# with --local-bn or in micro-batches.
#
# To break it, leave out `// dist.get_world_size()` in make_loaders().
# Then the batch grows with the number of ranks, a common fault. One rank passes. Two ranks make one
# step an epoch in place of three, and the message names their run. (Lesson 1 does not see this,
# because it makes its own loaders.)
#
# To break it in another way, give resume() only a part: `resume(path, identity, {"net": net})`.
# Then the momentum is lost, and only the job that was stopped ends with a different net. The
# message names its three runs.
#
# The runs are tried from simple to hard, and the test stops at the first that differs. So if only
# this lesson fails, the message tells where to look. If it names one rank, look at the random
# numbers, the learning rate or the clipping. If it names several ranks, look at the loaders or
# their workers. If it names three runs, look at the checkpoint.
OPTIONS = "--epochs 2 --global-batch-size 12 --lr 0.1 --clip-grad-norm 0.3 --seed 5"
NUM_SAMPLES = 47  # Three batches of 12 an epoch. The other 11 samples are left out.


class Augmented(Ragged):
    """Signals of Ragged, scaled by random numbers from PyTorch, NumPy and Python."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (torch.rand(()) + np.random.rand() + random.random()), y


def make_augmented_task(make_task, args, device):
    """Return a task.

    With --micro-batch-size its net has no BatchNorm, because a layer would see only one micro-batch
    at a time.
    """
    net = plain_net() if args.micro_batch_size else ddp.ConvNet()
    # Each parameter has its own group and rate.
    groups = []
    for number, parameter in enumerate(net.to(device).parameters()):
        groups.append({"params": [parameter], "lr": args.lr * (1 + number % 2)})
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
    return Augmented(NUM_SAMPLES), Ragged(10), net, optimizer


def plain_loop(train, args, device):
    """In place of train(), on one rank: do in plain PyTorch what a job with OPTIONS must do.

    Besides the task and warm_up() only the seeding is ours: the random numbers must be the same.
    """
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = make_augmented_task(None, args, device)
    rates = [group["lr"] for group in optimizer.param_groups]
    sampler = TorchSampler(train_set, seed=args.seed)
    batch_size = args.global_batch_size
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, indices in enumerate(BatchSampler(sampler, batch_size, drop_last=True)):
            samples = []
            for index in indices:
                ddp.seed_generators(args.seed, epoch, index)
                samples.append(train_set[index])
            x, y = default_collate(samples)
            F.cross_entropy(net(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad_norm)
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * warm_up(args, epoch + step * batch_size / NUM_SAMPLES)
            optimizer.step()
            optimizer.zero_grad()
    torch.save({"net": net.state_dict()}, args.checkpoint)


class Lesson6NumberOfRanks(TestCase):
    def test_a_job_ends_as_a_plain_loop_does(self):
        """Its net is equal on 1 to 4 ranks, and if it is stopped and goes on with other ranks."""
        # A job makes 3 steps in each of 2 epochs: here 2 steps on 4 ranks, 2 on 3, and 2 on 2. (A
        # step is 12/47 of an epoch. A run ends before the first step at or after stop_after.)
        stopped = [Run(4, stop_after=0.5), Run(3, stop_after=1.2), Run(2)]
        for option in ("", "--micro-batch-size 2"):
            options = f"{OPTIONS} {option}"
            expected = net_after(options, [Run(1)], train=plain_loop)
            with_workers = [Run(2, num_workers=0 if option else 1)]  # Starting them takes seconds.
            for runs in ([Run(1)], with_workers, [Run(3)], [Run(4)], stopped):
                net = net_after(options, runs, make_task=make_augmented_task)
                what = f"The net differs from that of the plain loop, after {runs} with {options}"
                assert_close(net, expected, what)


# ------------------------------------------------------------------------------------------------
# Above is what ddp_reference.py guarantees of a training. Below are the other guarantees, by
# chapters: what is refused, printed and saved, and how the processes end. Each test edits
# ddp_reference.py as you may edit your copy, by run_job(2, options, name=function).
#
# To test a new option: if plain PyTorch can repeat it in training, add it to OPTIONS and to
# plain_loop(). If it changes evaluation or what is printed, give loss_and_accuracy() (Lesson 4) an
# argument for it, and use it in the test of all printed numbers. Otherwise write a test of its own.
# Then have ddp_reference.py ignore the option for a moment, and see a test fail.


# ---- Chapter 1: the options
# Options that main() must refuse, with a message that the regular expression matches. If it accepts
# them, it trains a whole job before the test fails.
COMMAND_LINES = (
    ("--nproc-per-node 7", "must be a multiple of the number of processes"),
    ("--checkpoint-every 1", "--checkpoint-every needs --checkpoint"),
    ("--epochs 0", "invalid positive_int value"),
    ("--log-every -1", "invalid positive_int value"),
    ("--num-workers none", "invalid int value"),
    ("--lr fast", "invalid float value"),
)


class Chapter1Options(TestCase):
    def assert_refused(self, options, pattern, **environ):
        """Assert that main() refuses options in one line that has this pattern, and status 2."""
        sys.argv = ["ddp_reference.py", *options.split()]
        with (
            mock.patch.dict(os.environ, environ),
            contextlib.redirect_stderr(io.StringIO()) as err,
            self.assertRaisesRegex(SystemExit, "^2$", msg=options),
        ):
            ddp.main()
        self.assertRegex(err.getvalue(), f"^.*: error: .*{pattern}.*\n$")

    def test_what_cannot_work_is_refused_in_one_line(self):
        """Each of these command lines ends with status 2 before a process is started."""
        for options, pattern in COMMAND_LINES:
            self.assert_refused(options, pattern)
        self.assert_refused("", "start torchrun", RANK="0")


# ---- Chapters 2 to 4: the step, the copies and the loop
def call_train_step_wrongly(train, args, device):
    """On a rank: without DDP's wrapper, or with a batch of another form, a step is refused."""
    net = ddp.ConvNet().to(device)
    x, y = whole_batch(ddp.SyntheticDataset(4, 8, seed=0))
    optimizer = torch.optim.SGD(net.parameters())
    model = nn.parallel.DistributedDataParallel(net)
    for pattern, *arguments in (
        ("needs DistributedDataParallel", net, optimizer, (x, y)),
        ("a batch must be tensors", model, optimizer, {"x": x, "y": y}),
        ("a batch must be tensors", model, optimizer, (x, ("a", "b"))),
        ("with the sample as dimension 0", model, optimizer, (x.movedim(1, 0), y)),
    ):
        with TestCase().assertRaisesRegex(TypeError, pattern):
            ddp.train_step(*arguments)


def print_calls(train, args, device):
    """On a rank: train, and print the names of all operators that were called."""
    os.environ["KINETO_LOG_LEVEL"] = "9"  # Otherwise the profiler prints lines of its own.
    with torch.profiler.profile() as profile:
        train(args, device)
    print([event.name for event in profile.events()])


def draw_like_dropout(batch_sums, output, y):
    """In place of batch_sums(): in training, draw a number and print it."""
    assert output.dtype == torch.bfloat16, "--amp is ignored"
    if output.requires_grad:
        assert torch.randint(2**16, ()) != np.random.randint(2**16), "PyTorch and NumPy draw alike"
        print("number", torch.rand(1, device=y.device).item())
    return batch_sums(output, y)


def leave_items_unseeded(SeededItems, dataset, seed):
    """In place of SeededItems: only steps are seeded here, as if a loader worker read the items."""
    dataset.epoch = torch.tensor(0)
    return dataset


def make_plain_task(make_task, args, device):
    """Return a task with uneven labels, whose net is the same in training and in evaluation.

    The items of validation are random.
    """
    net = plain_net().to(device)
    return Ragged(48), Augmented(25), net, torch.optim.Adam(net.parameters(), lr=args.lr)


def train_with_slow_clock(train, args, device):
    """On a rank: train, while it is two seconds later at each look at the clock."""
    with mock.patch("time.perf_counter", iter(range(0, 99, 2)).__next__):
        train(args, device)


class Odd(nn.Module):
    """A net with all that could be mistaken for copies that differ: none of it may be."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(3, 3, 3, padding=1, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Conv1d(3, 3, 1, dtype=torch.bfloat16)
        self.tied = self.last
        self.untrained = nn.Linear(1, 1).requires_grad_(False)
        self.register_buffer("count", torch.tensor(0))

    def get_extra_state(self):
        return "a text"

    def set_extra_state(self, state):
        assert state == "a text"

    def forward(self, x):
        self.count += 1
        x = self.first(x.double()).float()
        return self.last(self.dropout(self.norm(x)).bfloat16())


class Drifting(nn.Sequential):
    """plain_net() with two faults: a parameter is unfrozen too late, and a buffer sees a share."""

    def forward(self, x):
        self[0][0].bias.requires_grad_(True)  # DDP was made before.
        self[0].unused += x.mean()
        return super().forward(x)


def make_task_with(make_net, make_task, args, device):
    """Return a small task with a net of this kind."""
    net = make_net().to(device)
    data = ddp.SyntheticDataset(48, 64, seed=0)
    return data, data, net, torch.optim.SGD(net.parameters(), lr=args.lr)


def make_drifting_net():
    return Drifting(plain_net())


class Chapters2To4(TestCase):
    def test_what_would_train_wrongly_is_refused(self):
        """DDP's wrapper is missing, or a batch has another form."""
        run_job(1, train=call_train_step_wrongly)

    def test_a_step_calls_two_collectives_and_never_item(self):
        """So a step of a small net waits for the other ranks twice, and never for its GPU."""
        options = "--epochs 1 --micro-batch-size 2 --clip-grad-norm 1"
        # Reading a sample calls .item(), too. So both jobs read 42 samples, in 7 steps of 6 or in 3
        # of 14, and those calls cancel out. Adam on a CPU also calls it, so this task uses SGD.
        run_two = partial(run_job, 2, train=print_calls, make_task=make_augmented_task)
        of_7_steps, _ = run_two(f"{options} --global-batch-size 6")
        of_3_steps, _ = run_two(f"{options} --global-batch-size 14")

        # The longer job has four more steps, so the difference is what four steps call.
        for operator, calls_of_4_steps in (("c10d::", 8), ("aten::item", 0)):
            calls = of_7_steps.count(operator) - of_3_steps.count(operator)
            assert calls == calls_of_4_steps, f"four steps call {operator} {calls} times"

    def test_ranks_steps_and_micro_batches_draw_their_own_numbers(self):
        """Dropout masks differ, also after a stop. With --amp all logits are bfloat16."""
        options = f"{SMALL} --micro-batch-size 3 --amp --checkpoint drawn --checkpoint-every 1"
        run_two = partial(
            run_job, 2, options, batch_sums=draw_like_dropout, SeededItems=leave_items_unseeded
        )
        ranks = run_two(lr_factor=partial(stop_at, 1.3)) + run_two()

        drawn = re.findall(r"number \S+", "".join(ranks))
        # 2 ranks make 8 steps of 2 micro-batches.
        assert len(set(drawn)) == len(drawn) == 32, f"these are not 32 different numbers: {drawn}"

    def test_all_printed_numbers_are_those_of_the_job(self):
        """They are so after stops, too. Only rank 0 prints. A new --lr counts after a stop."""
        # With a learning rate of 0 the net stays what it is, so loss_and_accuracy() (Lesson 4)
        # tells its numbers. There is no folder `no`, so the path of the checkpoint works only
        # because main() resolves it.
        means = "loss {:.4f} accuracy {:.4f}".format(*loss_and_accuracy(plain_net(), Ragged(48)))
        all_means = means + " | val_loss {:.4f} val_accuracy {:.4f}".format(
            *loss_and_accuracy(plain_net(), ddp.SeededItems(Augmented(25), 1))
        )
        options = f"{SMALL} --lr 0 --log-every 4 --checkpoint no/../numbers --checkpoint-every 2"
        run_three = partial(run_job, 3, train=train_with_slow_clock, make_task=make_plain_task)
        # The first run ends before its first step, but has saved the state with its own --lr.
        run_three(f"{options} --lr 1", lr_factor=partial(stop_at, 0))
        assert os.path.exists("numbers"), "nothing was saved before the first step"
        run_three(options, lr_factor=partial(stop_at, 0.7))

        printed = "".join(run_three(options))

        # Between two looks at the clock, 24 samples are read after the stop, and then 48.
        expected = f"""
resuming {os.path.realpath("numbers")} at epoch 0/2, sample 24
epoch 0 | 48/48 | {means}
epoch 0 | {all_means} | 12.0 samples/s
epoch 1 | 48/48 | {means}
epoch 1 | {all_means} | 24.0 samples/s
"""
        assert printed.endswith(expected), f"{printed}\nshould end with{expected}"
        # A job that has ended goes on if it is given more epochs.
        assert f"epoch 2 | {all_means}" in run_three(f"{options} --epochs 3")[0]

    def test_copies_that_drift_apart_end_the_job(self):
        """The error names the tensors. What may look like it does not end a job on 1 to 4 ranks."""
        for options, names in (
            ("", r"'0\.0\.bias.*'0\.unused"),
            ("--local-bn", r"\['0\.0\.bias[^,]*, '0\.0\.bias[^,]*\]"),
        ):
            with self.assertRaisesRegex(mp.ProcessRaisedException, f"nets differ: .*{names}"):
                run_job(
                    2, f"{SMALL} {options}", make_task=partial(make_task_with, make_drifting_net)
                )
        for world_size, options in enumerate(("", "--local-bn", "--micro-batch-size 2", "--amp")):
            options = f"{SMALL} {options} --checkpoint odd{world_size}"
            run_job(world_size + 1, options, make_task=partial(make_task_with, Odd))


# ---- Chapter 6: checkpoints
def with_optimizer(make_optimizer, make_task, args, device):
    """Return the task with another optimizer."""
    train_set, val_set, net, _ = make_task(args, device)
    return train_set, val_set, net, make_optimizer(net)


def sgd(net):
    return torch.optim.SGD(net.parameters())


def adam_in_another_order(net):
    return torch.optim.Adam(reversed(list(net.parameters())))


def adam_with_a_temperature(net):
    return torch.optim.Adam([*net.parameters(), nn.Parameter(torch.ones(()))])


def adam_with_a_numpy_number(net):
    return torch.optim.Adam(net.parameters(), weight_decay=np.float64(0.1))


WITH_NUMPY_NUMBER = {"make_task": partial(with_optimizer, adam_with_a_numpy_number)}


def make_small_net(ConvNet):
    return nn.Sequential(nn.Conv1d(3, 3, 3, padding=1))


def lose_checkpoint(train, args, device):
    """On a rank: all but rank 0 do not find the file."""
    if dist.get_rank():
        args.checkpoint = "none"
    train(args, device)


def make_unequal_data(make_task, args, device):
    task = make_task(args, device)
    task[0].tensors[0].add_(dist.get_rank())
    return task


class OwnGenerator(ddp.SyntheticDataset):
    """Its items depend on how many were read before."""

    generator = np.random.default_rng(0)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * self.generator.random(), y


def make_data_with_generator(SyntheticDataset, *arguments):
    return OwnGenerator(*arguments)


def make_infinite_statistic(make_task, args, device):
    task = make_task(args, device)
    task[2][1].running_mean.fill_(torch.inf)
    return task


def forget_accuracy(batch_sums, output, y):
    return batch_sums(output, y)[:2]


def rename_sums(train, args, device):
    ddp.SUMS = ("labels", "loss", "top1")
    train(args, device)


def share_file(save_checkpoint, path, *arguments):
    """In place of save_checkpoint(): another job writes the file at the same time."""

    def write_half_a_file(file):
        pathlib.Path(f"{path}.tmp").write_text("half a file")

    with mock.patch("os.fsync", write_half_a_file):
        save_checkpoint(path, *arguments)


def fill_disk(save_checkpoint, *arguments):
    """In place of save_checkpoint(): a file can have only 9 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
    save_checkpoint(*arguments)


# Two ranks run each fault with SMALL, `--checkpoint ck` and its options. It must end the job with a
# message that the expression matches, and leave the file ck as it was. ck is a sound checkpoint of
# this job, after both its epochs. `--checkpoint new` does not exist, and must not exist afterwards.
# A damaged file is written in the test below, as the file `code` is.
FAULTS = (
    ("--seed 99", "of a job with args.seed=0", {}),
    ("--num-samples 60", r"of a job with len\(train_set\)=48", {}),
    ("--global-batch-size 24", "of a job with args.global_batch_size=12", {}),
    ("--num-samples 6", "larger than the training set", {}),
    ("--epochs 3 --lr inf", "is not finite, so nothing was written to .*ck", {}),
    ("--checkpoint code", "Weights only load failed", {}),
    ("", "damaged or of another job: .*order=", {"ConvNet": make_small_net}),
    ("", "of a job with optimizer Adam", {"make_task": partial(with_optimizer, sgd)}),
    ("", "of a job with order=", {"make_task": partial(with_optimizer, adam_in_another_order)}),
    ("", "not the net's", {"make_task": partial(with_optimizer, adam_with_a_temperature)}),
    ("", "of a job with SUMS=.*accuracy", {"train": rename_sums}),
    ("", r"do not all find .*sample\) \(0, 0\).*sample\) \(2, 0\)", {"train": lose_checkpoint}),
    ("--checkpoint new", "unequal data.*'data=.*'data=", {"make_task": make_unequal_data}),
    ("--checkpoint new", "an item differs", {"SyntheticDataset": make_data_with_generator}),
    ("--checkpoint new", "1.running_mean is not finite", {"make_task": make_infinite_statistic}),
    ("--checkpoint new", "written to .*new: .*numpy", WITH_NUMPY_NUMBER),
    ("--checkpoint none/ck", "written to .*none/ck: FileNotFound", {}),
    ("--checkpoint=", "damaged or of another job: IsADirectory", {}),
    ("--epochs 3", "size of tensor", {"batch_sums": forget_accuracy}),
    ("--epochs 3", "written to .*ck: ", {"save_checkpoint": share_file}),
    ("--epochs 3", "written to .*ck: OSError.*File too large", {"save_checkpoint": fill_disk}),
)  # fmt: skip


def flip_bits(train, args, device):
    """On a rank: flip one bit in each of 300 bytes. The file is refused, or loads as it was."""
    net = nn.Linear(30, 30)
    job = "flip", ["identity"], {"net": net}
    expected = net.weight.clone()
    ddp.save_checkpoint(*job, (0, 0, 0))
    whole = pathlib.Path("flip").read_bytes()
    for position in random.Random(0).sample(range(len(whole)), 300):
        net.weight.data.zero_()
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        pathlib.Path("flip").write_bytes(damaged)
        try:
            ddp.resume(*job)
        except ValueError:
            continue
        assert net.weight.equal(expected), f"a flip in byte {position} loads as other numbers"


def exit_when_printing(train, args, device):
    """On a rank: train, but end when the line of an epoch is to be printed."""

    def exit_at_epoch(text):
        if text.startswith("epoch"):
            os._exit(0)

    with mock.patch("builtins.print", exit_at_epoch):
        train(args, device)


class Chapter6Checkpoints(TestCase):
    def test_a_fault_ends_the_job_and_leaves_the_checkpoint(self):
        """The message names the cause. The checkpoint stays what it was, or is not made."""
        run_job(1, f"{SMALL} --checkpoint ck")
        intact = torch.load("ck")
        torch.save(os.system, "code")  # To load this is to import code.

        for options, pattern, replacements in FAULTS:
            with self.subTest(pattern), self.assertRaisesRegex(mp.ProcessRaisedException, pattern):
                run_job(2, f"{SMALL} --checkpoint ck {options}", **replacements)
            assert_close(torch.load("ck")["net"], intact["net"], pattern, tolerance=0)
            assert torch.load("ck")["progress"][:2] == (2, 0) and not os.path.exists("new"), pattern

    def test_no_flipped_bit_loads_as_other_numbers(self):
        """Each of 300 damaged files is refused, or loads the same weights."""
        run_job(1, train=flip_bits)

    def test_an_epoch_is_saved_before_its_line_is_printed(self):
        """So a kill after the line, or a full pipe, loses no epoch.

        A link stays a link, and what a killed job left of a file does no harm.
        """
        os.symlink("target", "link")
        pathlib.Path("target.tmp").write_text("half a file")

        run_job(1, f"{SMALL} --checkpoint link", train=exit_when_printing)

        assert os.path.islink("link")
        assert torch.load("target")["progress"][:2] == (1, 0)


# ---- The README: what it shows is run
def readme_programs():
    """Return the programs of the README by name. Each is the new side of a diff."""
    texts = {"ddp_reference.py": pathlib.Path(ddp.__file__).read_text()}
    for old_name, name, diff in re.findall(
        r"(?ms)^```diff (\S+) (\S+)\n(.*?)^```", README.read_text()
    ):
        # The diff from one.py to many.py shows both as a whole. The others show hunks.
        text = texts.setdefault(old_name, side(diff, "-"))
        for hunk in re.split(r"(?m)^@@.*\n", diff):
            old = side(hunk, "-")
            assert old in text, f"The README's diff of {name} shows other lines:\n{old}"
            text = text.replace(old, side(hunk, "+"))
        texts[name] = text
    return texts


def side(diff, sign):
    """Return the old side of a diff, for "-", or the new one, for "+"."""
    return "".join(re.findall(rf"(?m)^[ {sign}](.*\n)", diff))


def write_readme_programs():
    """Write the programs of the README into this folder, but not over a file that exists."""
    for name, text in readme_programs().items():
        if os.path.exists(name):
            print(f"{name} exists already, and is left as it is")
        else:
            pathlib.Path(name).write_text(text)
            print(f"wrote {name}")


def be_program(text, main):
    """On a rank: run a program in place of main(). Without a GPU for each rank, it sees none."""
    if int(os.environ["WORLD_SIZE"]) > GPUS:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    exec(text, {"__name__": "__main__"})


def program_lines(text, world_size, options=""):
    """Return the lines that a program prints on so many ranks, but not its speed."""
    lines, *_ = run_job(world_size, options, main=partial(be_program, text))
    return re.sub(r"ddp on .*\n| \| [\d.]+ samples/s", "", lines)


def order_for_each_rank(DistributedSampler, dataset, seed, drop_last):
    return DistributedSampler(dataset, seed=seed + dist.get_rank(), drop_last=drop_last)


STEP = """        loss = cross_entropy(model(x.to(device)), y.to(device))
"""
WITH_UNEVEN_LABELS = """        y[x[:, 0, 0] > 0, 4:] = -100
"""
WITH_BATCH_NORM = """model = torch.nn.Sequential(
    torch.nn.Conv1d(3, 8, 3, padding=1), torch.nn.BatchNorm1d(8), torch.nn.Conv1d(8, 3, 1)
).to(device)
"""
WITH_RANDOM_ITEMS = """class Random(ddp.SyntheticDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * 4 * torch.rand(()), y

train_set = Random("""
# Rows of the README's table: many.py with this text replaced by that one prints the row's numbers,
# its last accuracies, on so many ranks.
ROWS = (
    (1, (2,), " // world_size", ""),
    (2, (2,), "= cross_entropy(model(", "= cross_entropy(model.module("),
    (3, (2,), "    sampler.set_epoch(epoch)", "    pass"),
    (4, (2,), "range(rank, len(val_set), world_size)", "DistributedSampler(val_set)"),
    (5, (2,), "    dist.all_reduce(num_correct)", "    pass"),
    (6, (1, 2, 4), STEP, WITH_UNEVEN_LABELS + STEP),
    (7, (1, 2, 4), "model = torch.nn.Conv1d(3, 3, 3, padding=1).to(device)\n", WITH_BATCH_NORM),
    (8, (1, 2, 4), "train_set = ddp.SyntheticDataset(", WITH_RANDOM_ITEMS),
)


@needs_readme
class ReadmePrograms(TestCase):
    def test_the_table_of_experiments_is_that_of_lesson_2(self):
        for setting, *shown in EXPERIMENTS:
            self.assertIn(f"{setting} | {' | '.join(shown)} |", README.read_text())

    def test_programs_print_the_same_on_one_process_and_on_two(self):
        """So do many.py and dp.py, as one.py does on one process, and my_job.py."""
        texts = readme_programs()
        one = program_lines(texts["one.py"], 1)
        for name in ("many.py", "dp.py"):
            self.assertEqual(program_lines(texts[name], 2), one, name)
        options = "--epochs 3 --lr 0.1"
        jobs = [program_lines(texts["my_job.py"], ranks, options) for ranks in (1, 2)]
        self.assertEqual(*jobs)

    def test_the_rows_of_the_review_table_have_the_numbers_of_programs(self):
        many = readme_programs()["many.py"]
        for row, world_sizes, old, new in ROWS:
            assert old in many, f"row {row}: many.py lacks {old}"
            text = many.replace(old, new)
            # The last number, such as 0.9862, stands before the end of the line.
            numbers = " ".join(program_lines(text, ranks)[-7:-1] for ranks in world_sizes)
            self.assertRegex(README.read_text(), rf"(?m)^\| {row} \|.*\b{numbers}\b")

    def test_an_order_for_each_rank_changes_the_last_digit(self):
        """This is row 10 of the review table: the main job, on two ranks."""
        lines, _ = run_job(2, DistributedSampler=order_for_each_rank)
        accuracy = lines.split("val_accuracy ")[-1][:6]
        self.assertRegex(README.read_text(), rf"(?m)^\| 10 \|.*\b{accuracy} and not 0.9358\b")

    def test_shards_train_as_their_samples_do_or_are_refused(self):
        """A tar file is refused if it lacks y, holds links, or is cut off."""
        path = pathlib.Path("a.tar")
        dataset = ddp.SyntheticDataset(48, 64, seed=0)
        with tarfile.open(path, "w") as tar:
            for index in range(48):
                for name, array in zip(("x.npy", "y.npy"), dataset[index]):
                    np.save(name, array)
                    tar.add(name, f"{index}.{name}")
        job = partial(be_program, readme_programs()["shards.py"])
        options = f"{SMALL} --shards a.tar --val-shards a.tar"
        from_shards, *_ = run_job(2, options, main=job)
        from_memory, *_ = run_job(2, SMALL)
        means = [re.findall(r" loss \S+ accuracy \S+", text) for text in (from_shards, from_memory)]
        self.assertEqual(*means)

        # After 15 samples, of 5120 bytes each, one file is cut off, and the other one goes on with
        # something else.
        intact = path.read_bytes()
        contents = [intact[:76800], intact[:76800] + b"?" * 2000]
        for kind in (tarfile.SYMTYPE, tarfile.DIRTYPE):
            with tarfile.open(path, "w") as tar:
                tar.addfile(tarfile.TarInfo("a.x.npy"))
                member = tarfile.TarInfo("a.y.npy")
                member.type = kind
                tar.addfile(member)
            contents.append(path.read_bytes())
        for content in contents:
            path.write_bytes(content)
            with self.assertRaisesRegex(mp.ProcessRaisedException, "a.tar is damaged or lacks"):
                run_job(1, options, main=job)


# ---- Chapters 5 and 9: the processes
SCRIPTS = {
    "hanging.py": """
import os, signal
import torch._dynamo  # PyTorch would import this in the first step, which would take seconds.
import ddp_reference as ddp

rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]

def lr_factor(args, epochs_done):
    if epochs_done > 1.3 and (rank, restarts) == ("0", "0"):
        print("gloo on", os.environ["GLOO_SOCKET_IFNAME"], "workers by", ddp.mp.get_start_method())
        signal.pause()
    return 1

def evaluate_or_hang(*arguments, evaluate=ddp.evaluate):
    if (rank, restarts) == ("1", "1"):
        signal.pause()
    return evaluate(*arguments)

ddp.lr_factor = lr_factor
ddp.evaluate = evaluate_or_hang
ddp.main()
""",
    "orphan.py": """
import os, signal
import ddp_reference as ddp

def end_after_parent(end_with_parent=ddp.end_with_parent):
    os.kill(os.getppid(), signal.SIGKILL)  # The launcher ends before this rank has asked.
    ddp.mp.parent_process().join()
    end_with_parent()

ddp.end_with_parent = end_after_parent
if __name__ == "__main__":
    ddp.main()
""",
    "endless.py": """
import signal
from torch.utils.data import get_worker_info
import ddp_reference as ddp

def get_stuck(dataset, index):
    assert get_worker_info(), "with loader workers, no rank reads an item"
    print("stuck", flush=True)
    signal.pause()

ddp.SyntheticDataset.__getitem__ = get_stuck
if __name__ == "__main__":
    ddp.main()
""",
    "forgetful.py": """
import ddp_reference as ddp

def forget_momentum(path, identity, parts, resume=ddp.resume):
    return resume(path, identity, {"net": parts["net"]})

ddp.resume = forget_momentum
if __name__ == "__main__":
    ddp.main()
""",
}


def start_python(command, sigint=signal.SIG_DFL):
    """Start a Python program, with its output in pipes. sigint: SIG_IGN has it ignore Ctrl-C."""
    program = subprocess.Popen(
        [sys.executable, *command.split()],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, sigint),
    )
    unittest.addModuleCleanup(program.terminate)  # in case no test has waited for its end
    return program


def wait_for(program, status=0):
    """Return (stdout, stderr) of a program when all processes that hold its pipes have ended."""
    out, err = program.communicate(timeout=120)
    assert program.returncode == status, f"status {program.returncode}: {out}{err}"
    return out, err


@cache
def start_slow_programs():
    """Write SCRIPTS, and start the programs that take long, once."""
    for name, text in SCRIPTS.items():
        pathlib.Path(name).write_text(text)
    torchrun = "--standalone --local-addr=127.0.0.1 --nproc-per-node=2 --max-restarts=2"
    job = f"hanging.py {SMALL} --timeout 8 --checkpoint hanging --checkpoint-every 1"
    forgetful = f"forgetful.py {SMALL} --global-batch-size 10"
    return {
        "hanging": start_python(f"-m torch.distributed.run {torchrun} {job}"),
        # PyTorch sends a rank SIGINT when its launcher ends. Here this is ignored.
        "orphan": start_python("orphan.py --nproc-per-node 1", signal.SIG_IGN),
        "main job": start_python("-m ddp_reference"),
        # 10 is a multiple of 2, but not of 3 or 4, so there is one run less of each.
        "check": start_python(f"-m test_ddp_reference check {forgetful}"),
    }


def print_watchdog(run_rank, *arguments):
    """In place of run_rank(): print when the watchdog is started and stopped."""

    def start(seconds, exit):
        print("started", seconds, exit)

    with (
        mock.patch("faulthandler.dump_traceback_later", start),
        mock.patch("faulthandler.cancel_dump_traceback_later", partial(print, "stopped")),
    ):
        run_rank(*arguments)


class TheProcesses(TestCase):
    @needs_readme
    def test_the_main_job_prints_what_the_readme_shows(self):
        """Its losses and accuracies may differ by rounding only. The sampler does not warn."""
        out, err = wait_for(start_slow_programs()["main job"])

        kind = f"nccl, world size {GPUS}, cuda" if GPUS else "gloo, world size 2, cpu"
        self.assertIn(f"ddp on {kind}, global batch size 240, torch ", out)
        last_epoch = re.compile(
            r"^epoch 5 \| loss (\S+) accuracy (\S+) \| val_loss (\S+) val_accuracy (\S+)", re.M
        )
        printed, shown = (
            list(map(float, last_epoch.search(text).groups())) for text in (out, README.read_text())
        )
        # TF32 is not off here.
        assert_close(printed, shown, "A number is not the README's.", tolerance=0.005)
        assert "set_epoch" not in err  # The sampler warns of a second pass only.

    def test_the_watchdog_restarts_at_each_batch_and_is_stopped(self):
        """It starts before train(), and is stopped at the end."""
        options = f"{SMALL} --epochs 1 --num-samples 12"
        printed, _ = run_job(2, options, run_rank=print_watchdog)

        # On rank 0: at the start, at one batch of training, at three of validation (13 samples).
        self.assertRegex(
            printed, r"^started 60.0 False\nddp.*\n(started.*\n){4}epoch.*\nstopped\n$"
        )

    def test_no_process_is_left_when_the_launcher_alone_ends(self):
        """None is left even if it ignores Ctrl-C, as after &, or if a loader worker is stuck."""
        out, _ = wait_for(start_slow_programs()["orphan"], -signal.SIGKILL)
        assert not out, out  # Its rank has ended before it trained.
        for signal_number, status, sigint in (
            (signal.SIGINT, 130, signal.SIG_DFL),
            (signal.SIGKILL, -signal.SIGKILL, signal.SIG_IGN),
        ):
            launcher = start_python(
                f"endless.py {SMALL} --nproc-per-node 1 --num-workers 1", sigint
            )
            self.assertIn("stuck\n", launcher.stdout)  # This reads until the line comes.

            launcher.send_signal(signal_number)

            wait_for(launcher, status)

    def test_a_hang_prints_all_stacks_and_torchrun_restarts(self):
        """A rank hangs in a step, then one in evaluate(). After two restarts the job ends well."""
        out, err = wait_for(start_slow_programs()["hanging"])

        times = re.findall(r"Timeout \((.*)\)!", err)
        self.assertEqual(times, ["0:00:08", "0:00:10.500000"] * 2)  # Rank 1 waits longer.
        for function in ("lr_factor", "train_step", "evaluate_or_hang"):
            assert f" in {function}\n" in err, err
        # NCCL does not block rank 0, so on GPUs it may have left evaluate().
        assert " in evaluate\n" in err or " in named_means\n" in err, err
        assert "gloo on lo workers by spawn\n" in out, out  # A forked worker may hang.
        # This ends the line "resuming .../hanging at ...". The checkpoint's name is hanging.
        assert "hanging at epoch 1/2, sample 24" in out

    def test_check_finds_what_only_a_kill_shows(self):
        """Two processes are as one, but the momentum is lost over the kill."""
        out, _ = wait_for(start_slow_programs()["check"], status=1)

        self.assertRegex(out, r"\n2 processes +differs by 0\.000\d ")
        self.assertRegex(out, r"\n2 processes, killed; 1 from epoch 1/2, .*\(first at epoch 1, ")
        self.assertIn("the checkpoint lacks some state", out)


# ---- bash run.sh check
LINE = re.compile(r"epoch (\d+) \| (?:(\d+)/\d+ \| )?(.*?)(?: \| ([\d.]+) samples/s)?$")
HELP = """Try whether a job is the same on any number of processes, and over a kill.

The job runs on one process, on each larger number that divides its global batch (up to 4 on CPUs,
and up to all GPUs), and once with a kill past its middle, after which another number goes on. The
line of each step is compared. The status is 0 if nothing differs by more than the tolerance, and
otherwise 1. What is equally wrong on every number of processes, this cannot see. All other options
go to the job."""
CAUSES = {
    "first step": "from the first step on: look at the samples and their order, the batch size, "
    "random numbers such as dropout's, BatchNorm, and a loss or collate function that knows its "
    "rank",
    "later": "only after some steps: look at dropout, at a bias before BatchNorm (its gradient is "
    "only rounding), and at the learning rate; slight differences that grow are rounding",
    "kill": "only after the kill: the checkpoint lacks some state",
}


class JobRun(NamedTuple):
    """What a run of a job has printed: its means by (epoch, samples read), and its last speed."""

    means: dict
    speed: float
    head: str


def run_and_read(command, kill_at=None, show=False):
    """Run a job, and kill it when it prints the line of the place kill_at. Return a JobRun.

    The end of an epoch is the place (epoch, inf). Ends this program if the job fails, whose own
    error stands above.
    """
    means, speed, head = {}, 0.0, ""
    process = subprocess.Popen(
        [sys.executable, *command],
        text=True,
        stdout=subprocess.PIPE,
        preexec_fn=ddp.end_with_parent,
    )
    try:
        for line in process.stdout:
            if match := LINE.match(line):
                epoch, samples_read, text, rate = match.groups()
                place = int(epoch), float(samples_read or "inf")
                means[place] = re.findall(r" (-?[\d.]+|-?inf|nan)\b", text)
                speed = float(rate or speed)
                if place == kill_at:
                    process.kill()
            else:
                head += line
            if show and ("samples/s" in line or not match):
                print(line, end="", flush=True)
        if process.wait() not in (0, -signal.SIGKILL if kill_at else 0):
            sys.exit("check: the job failed")
    finally:
        process.kill()
        process.stdout.read()  # until all its processes have ended
    return JobRun(means, speed, head)


def compare(name, run, expected, tolerance):
    """Print how far a run is from the expected one: return the first place that differs."""
    largest = 0.0
    first = None
    for place, numbers in expected.means.items():
        for a, b in zip(run.means.get(place, numbers), numbers):
            difference = 0.0 if a == b else abs(float(a) - float(b))
            largest = max(largest, difference)
            if first is None and not difference <= tolerance:
                first = place
    # After a kill the line of a step that was saved may be missing.
    if len(run.means) < len(expected.means) - ("killed" in name):
        first = first or next(place for place in expected.means if place not in run.means)
    ratio = run.speed / expected.speed
    line = f"{name:50} differs by {largest:.4f}  {run.speed:9.1f} samples/s, {ratio:.2f} times"
    where = f"(first at epoch {first[0]}, sample {first[1]:.0f})" if first else ""
    print(line, where.replace("sample inf", "its end"), flush=True)
    return first


def check(arguments):
    """Run a job on several numbers of processes and over a kill: return the status, 0 or 1."""
    parser = ArgumentParser(
        "bash run.sh check [JOB.py]", description=HELP, allow_abbrev=False,
        formatter_class=ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.0005, help="of a printed mean")
    job = f"{HERE}/ddp_reference.py"
    if arguments and arguments[0].endswith(".py"):
        job, *arguments = arguments
    args, options = parser.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no file is left
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # A job that is killed leaves files there.

        def command(world_size, *more):
            # The job's own --checkpoint stays untouched.
            path = f"{tempfile.mkdtemp(dir=folder)}/ck"
            number = ["--nproc-per-node", f"{world_size}", "--log-every", "1"]
            return [job, *options, *number, "--checkpoint", path, *more]

        one = run_and_read(command(1), show=True)
        batch = re.search(r"global batch size (\d+)", one.head)
        steps = [place for place in one.means if place[1] < np.inf]
        if not batch or not steps or not one.speed:
            sys.exit(f"check: cannot read what {job} prints: it must be like ddp_reference.py")
        most = GPUS or 4
        counts = [n for n in range(2, most + 1) if int(batch[1]) % n == 0]
        if not counts:
            sys.exit(f"check: no number up to {most} divides the global batch of {batch[1]}")
        causes = set()
        for world_size in counts:
            run = run_and_read(command(world_size))
            if first := compare(f"{world_size} processes", run, one, args.tolerance):
                causes.add("first step" if first == steps[0] else "later")

        killed_command = command(counts[-1], "--checkpoint-every", "1")
        killed = run_and_read(killed_command, kill_at=steps[len(steps) // 2])
        was_over = list(one.means)[-1] in killed.means or not killed.means
        if was_over:
            print("The job was over before it could be killed: give it more --epochs.")
        else:
            other = counts[0] if len(counts) > 1 else 1
            path = killed_command.index("--checkpoint")
            again = run_and_read(command(other, *killed_command[path:]))
            told = re.search("resuming .* at (.*)", again.head)
            again = again._replace(means=killed.means | again.means)
            start = told[1] if told else "the start"
            name = f"{counts[-1]} processes, killed; {other} from {start}"
            if compare(name, again, one, args.tolerance) and not causes:
                causes.add("kill")
    for cause in sorted(causes):
        print(f"The number of processes changes this job {CAUSES[cause]}.")
    if not causes:
        print(f"The number of processes does not change this job by more than {args.tolerance}.")
    return was_over or len(causes) > 0


def main():
    """Run the tests, and end with `N passed, N failed, N skipped`. Or check a job."""
    if sys.argv[1:] == ["programs"]:
        return write_readme_programs()
    if sys.argv[1:2] == ["check"]:
        try:
            sys.exit(check(sys.argv[2:]))
        except KeyboardInterrupt:
            sys.exit(130)
    result = unittest.main(exit=False, verbosity=2).result
    failed = len(result.failures + result.errors)
    skipped = len(result.skipped)
    passed = result.testsRun - failed - skipped
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed > 0 or not result.testsRun)  # -k may name no test.


if __name__ == "__main__":
    main()
