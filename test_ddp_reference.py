"""The guarantees of ddp_reference.py. Read the names of the tests as a list of these guarantees.

    bash run.sh test                 # all of them; also: python -m pytest test_ddp_reference.py
    bash run.sh test -k Lesson       # the lessons; run these, too, to accept a machine with GPUs

First come seven lessons: what data-parallel training needs, and what ddp_reference.py guarantees.
The docstring of that file explains the words, such as rank, global batch and all-reduce. Each
lesson compares what ranks do with something simpler, such as PyTorch's sampler or one process that
has the whole batch. (Nets and losses are compared up to rounding, because ranks add the same
numbers in another order.)

"To break it" names a line of ddp_reference.py (in Lesson 0, of this file). Cover the lines below it
and predict what they say. Then change the line, run, for example, `bash run.sh test -k Lesson3`,
and undo the change. Ask each time: would a job with this fault have ended with an error? Would a
test of a single rank see it? Where both answers are no, as for about half of these faults, a test
must look at several ranks, and nearly always compare them with one process. If a test fails in a
rank, read from the last "Traceback" on.

After the lessons come the other guarantees, in the order of the chapters of ddp_reference.py, and
then the programs of the README and the processes. Chapter 7 is tested by Lesson 6 and with chapters
2 to 4, and chapter 8 by Lesson 5.

Most tests need chapter 1 of ddp_reference.py as it is. If you edit it, run them on an unedited
copy, and check your own job as the README says. How to test a new option stands at the end of
Lesson 6. A command line that must be refused goes to COMMAND_LINES (Chapter 1), and a fault that
must not harm a checkpoint to FAULTS (Chapter 6).
"""

import contextlib
import io
import logging
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
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
README = (HERE / "README.md").read_text()
os.environ |= {
    "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or torchrun's restarts may hang
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # Counting GPUs must not start CUDA: ranks are forked.
}
GPUS = torch.cuda.device_count()


def setUpModule():
    """Work in an empty folder."""
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    unittest.addModuleCleanup(os.chdir, HERE)
    os.chdir(folder.name)
    os.environ["TMPDIR"] = folder.name  # Programs that are killed leave files there.
    logging.disable()  # PyTorch would log each rank that it ends.


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
def add_up_integers(args, device):
    """On a rank: all-reduce integers, and compare each with the sum that it must be."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    for megabytes in (1, 64):  # The first one opens the connections, the second one is timed.
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
# To break it in another way, leave out `self.samples_read +` there.
# Then a job that goes on reads the epoch from its start. This fails even on one rank, which reads
# two steps where one is left.
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
# Two ranks read for two epochs, each in batches of 4. A title says what is special: "no sampler"
# (then the DataLoader does not shuffle), "set_epoch" (it is called before each epoch) or
# "drop_last" (an option of the DataLoader, not of the sampler). PyTorch's sampler and ours read the
# same. 4 and 5 have two runs each. Which of these faults does each run show?
# A. All ranks read the same samples, so a second rank is of no use.
# B. Each epoch has the same order. (Judge this in 1 to 3 only: the others are about remainders.)
# C. In an epoch some samples are never read.
# D. In an epoch some samples are read twice and the others once, so they weigh more.
# E. A rank has fewer than 4 samples in a step, so the step is noisier, and each sample weighs more.
# One run shows none. Then look up the answers in the README, under "Which samples a rank reads".
#
# Where the samples do not come out even, one must choose. make_loaders() chooses C: it drops the
# last samples, and train() calls set_epoch(), so that they are others in each epoch.
#
# To break it, replace `self.seed + self.epoch` by `self.seed` in DistributedSampler.
# Then epoch 1 of experiment 3 has the order of epoch 0. The message shows the line that was read,
# and that of the table. (Lesson 1 does not see this, because it stays in epoch 0.)
EXPERIMENTS = """
                  epoch 0               epoch 1
1. 8 samples, no sampler
         rank 0   [0,1,2,3] [4,5,6,7]   [0,1,2,3] [4,5,6,7]
         rank 1   [0,1,2,3] [4,5,6,7]   [0,1,2,3] [4,5,6,7]
2. 8 samples
         rank 0   [4,7,2,1]             [4,7,2,1]
         rank 1   [0,3,5,6]             [0,3,5,6]
3. 8 samples, set_epoch
         rank 0   [4,7,2,1]             [5,2,7,1]
         rank 1   [0,3,5,6]             [4,6,3,0]
4. 6 samples
         rank 0   [2,3,1]               [2,3,1]
         rank 1   [5,0,4]               [5,0,4]
   6 samples, drop_last
         rank 0
         rank 1
5. 5 samples
         rank 0   [4,1,2]               [4,1,2]
         rank 1   [0,3,4]               [0,3,4]
   5 samples, set_epoch
         rank 0   [4,1,2]               [0,2,1]
         rank 1   [0,3,4]               [4,3,0]
6. 10 samples
         rank 0   [4,7,3,0] [6]         [4,7,3,0] [6]
         rank 1   [1,5,9,8] [2]         [1,5,9,8] [2]
7. 10 samples, drop_last
         rank 0   [4,7,3,0]             [4,7,3,0]
         rank 1   [1,5,9,8]             [1,5,9,8]"""


def experiments(sampler_class):
    """Do the experiments, with samplers of this class: yield the lines of the table."""
    # A title, such as "3. 8 samples, set_epoch", is also the instruction: it says what to do.
    for title, num_samples in re.findall(r"(.* (\d+) samples.*)", EXPERIMENTS):
        yield title
        dataset = range(int(num_samples))
        for rank in range(2):
            sampler = None if "no sampler" in title else sampler_class(dataset, 2, rank)
            loader = DataLoader(dataset, 4, sampler=sampler, drop_last="drop_last" in title)
            line = f"         rank {rank}"
            for epoch in range(2):
                if "set_epoch" in title:
                    sampler.set_epoch(epoch)
                batches = " ".join(f"{batch.tolist()}" for batch in loader)
                line += f"   {batches.replace(', ', ','):19}"  # as wide as two batches
            yield line.rstrip()


class Lesson2Experiments(TestCase):
    def test_both_samplers_make_the_batches_of_the_readme(self):
        """PyTorch's sampler and ours read what the table shows. Ours warns of a second pass."""
        assert EXPERIMENTS in README  # Otherwise its table differs from the one above.
        _, _, *table = EXPERIMENTS.splitlines()  # without the head
        # Ours warns where an order is read twice, as in experiment 2. PyTorch's never does.
        with self.assertWarnsRegex(UserWarning, "order was read before: call set_epoch"):
            for sampler_class in (TorchSampler, ddp.DistributedSampler):
                for line, shown in zip(experiments(sampler_class), table):
                    assert line == shown, f"{sampler_class} reads\n{line}\nthe table has\n{shown}"


# ------------------------------------------------------------------------------------------------
# Helpers. To follow the lessons you need only this comment.
# - run_job(3, options) runs a job on three ranks, and returns what each has printed. It raises an
#   exception if a rank does. With train=function, each rank calls function(args, device) in place
#   of train(). With edit=text, each rank first executes this text inside the module ddp_reference,
#   as if you had edited the file. A function in the text takes the place of the old one, and can
#   still call it, as in `def f(x, *others, old=f)`. (`*others` takes further arguments, if your
#   copy passes some by position.)
# - SMALL are the options of a small job. If an option is given twice, the later one counts.
# - (For Lesson 6.) net_after(options, [Run(4, stop_after=0.5), Run(2)]) returns the net of a job
#   that is stopped on four ranks after half an epoch, and goes on with two. In the first epoch its
#   learning rate grows, by warm_up().
# - share(x) is the part of x that this rank has: every world_size-th item, as in Lesson 1.
# - whole_batch(dataset) is one batch of all samples.
# - The samples of Ragged have unequally many labels, and plain_net() has no BatchNorm.
# - assert_close(a, b, sentence) compares numbers or tensors up to rounding. If they differ, the
#   message ends with the sentence.
# Go on at Lesson 3, and come back when you want to know how they work.
def be_rank(rank, world_size, port, options, edit, replacements):
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
    exec(edit, vars(ddp))
    assert replacements.keys() <= vars(ddp).keys()  # Otherwise ddp_reference lacks such a name.
    vars(ddp).update(replacements)
    sys.argv = ["ddp_reference.py", *f"--timeout 60 {options}".split()]
    with open(f"rank{rank}", "w") as out, contextlib.redirect_stdout(out):
        ddp.main()
    assert not dist.is_initialized(), "the process group was not destroyed"


def run_job(world_size, options="", edit="", **replacements):
    """Run a job on so many ranks: return what each rank printed.

    edit: Python code that each rank executes in the module ddp_reference before the job.
    replacements: after the edit, make_task=f puts f in the place of ddp_reference.make_task. A
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
    arguments = world_size, store.port, options, edit, replacements
    mp.start_processes(be_rank, arguments, world_size, start_method="forkserver")
    return [pathlib.Path(f"rank{rank}").read_text() for rank in range(world_size)]


class Run(NamedTuple):
    """A run of a job: its ranks, the epochs after which it is stopped, and its loader workers."""

    ranks: int
    stop_after: float = np.inf
    num_workers: int = 0


def warm_up(args, epochs_done):
    """In place of learning_rate(): a rate that grows during the first epoch."""
    return args.lr * min(1, epochs_done + 0.1)


def stop_at(stop_after, args, epochs_done):
    """In place of learning_rate(): warm up, and end like a killed process after so many epochs."""
    if epochs_done >= stop_after:
        os._exit(0)  # With another status run_job() would raise.
    return warm_up(args, epochs_done)


def net_after(options, runs, **replacements):
    """Run a job with warm_up(), in runs that each resume the one before: return the last net.

    replacements: as for run_job(), and also its edit. stop_at() takes the place of learning_rate().
    """
    path = f"{tempfile.mkdtemp(dir='.')}/ck"
    for run in runs:
        replacements["learning_rate"] = partial(stop_at, run.stop_after)
        run_options = f"--num-workers {run.num_workers} --checkpoint {path} --checkpoint-every 1"
        printed, *_ = run_job(run.ranks, f"{options} {run_options}", **replacements)
        assert ("resuming" in printed) == (run != runs[0]), f"{run} should resume if not the first"
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

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        y[: index % 5 * 10] = -100
        return x, y


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
# To break it as the usual loop does, leave out the line `torch._foreach_mul_(...)`, and replace
# `sums[1].backward()` by `(sums[1] / (batch[-1] != -100).sum()).backward()`.
# Then each rank takes the mean over its own labels, and DDP averages the means. All ranks have
# equal nets, and one rank passes. But of two ranks, each of the 140 labels of rank 0 weighs 1/280
# in place of 1/270, and each of the 130 of rank 1 weighs 1/260.
#
# To break it in another way, replace `dist.get_world_size()` by 1 in train_step().
# Then two ranks move each parameter only half as far. The message names a parameter and by how much
# it differs. Yet one rank passes, because it multiplies by 1. With Adam, whose steps hardly depend
# on a factor, the test could miss this, so it uses SGD.
#
# To break it in a third way, leave out `.clamp(min=1e-9)`.
# Then the second test fails, whose batches have no label at all. There the gradient must be 0. But
# the factor is infinite now, and 0 times infinity is NaN. A net that holds a NaN is not saved.
#
# A fault that this lesson does not see: replace `start + micro_size >= batch_size` by True.
# Then DDP averages after each micro-batch. What was averaged before is equal on all ranks, so to
# average it again changes nothing, but the ranks wait for each other more often. The test of the
# collectives sees this: `bash run.sh test -k Chapters2To4`.
def compare_step(make_net, micro_batch_size, args, device):
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


class Lesson3Step(TestCase):
    def test_a_step_is_that_of_one_process_with_the_whole_batch(self):
        """Its parameters are equal on 1 to 4 ranks, with uneven labels and micro-batches."""
        for world_size, micro_batch_size in product(range(1, 5), (None, 2)):
            # partial() fixes the first two arguments. Each rank adds args and device.
            run_job(world_size, train=partial(compare_step, plain_net, micro_batch_size))

    def test_a_batch_without_labels_leaves_the_net_finite(self):
        """The net is saved, which is refused if it holds a number that is not finite."""
        edit = """
def batch_sums(output, y, *others, old=batch_sums):
    return old(output, torch.full_like(y, -100), *others)  # -100 means that there is no label.
"""
        run_job(2, f"{SMALL} --checkpoint unlabeled", edit)


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
#
# To break it in a third way, indent `dist.all_reduce(total)`, so that it stands in the loop.
# Then the sums of earlier batches are added up again in each later one, so the first batches count
# most. Rank 1 of 2 ends after its three batches, and fails. Meanwhile rank 0 waits for it in its
# fourth batch. In a job it might wait until the timeout, or get the numbers of another call.
#
# A fault that this lesson does not see, because it makes its own loader: in make_loaders(), write
# `val_sampler = DistributedSampler(val_set, shuffle=False)`.
# Then 3 ranks read 27 samples in place of 25, two of them twice. The test of all printed numbers
# sees this: `bash run.sh test -k Chapters2To4`.
def loss_and_accuracy(net, dataset):
    """Return the mean loss and the accuracy over all labels of a dataset, in plain PyTorch."""
    x, y = whole_batch(dataset)
    logits = net.eval()(x)
    accuracy = (logits.argmax(1) == y).sum() / (y != -100).sum()
    return [F.cross_entropy(logits, y).item(), accuracy.item()]


def net_with_batch_norm():
    """Return plain_net() between two BatchNorm layers."""
    return nn.Sequential(nn.BatchNorm1d(3), plain_net(), nn.BatchNorm1d(3))


def compare_evaluation(num_samples, args, device):
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
#
# To break it in a third way, replace `if not args.local_bn:` by `if args.local_bn:` in train().
# Then the job does not convert its net, and the second test fails with PyTorch's message. With more
# than one value on each rank, as in any usual job, there would be no error.
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
# The job has augmentation, a warm-up, clipping and uneven labels. It runs on 1 rank, on 2 with
# loader workers, on 3 and on 4. Then a job starts on 4 ranks, is stopped, goes on with 3, is
# stopped again, and ends with 2. All of this is done once more in micro-batches, with a net that
# has no BatchNorm (see Lesson 5). The net is the same because
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
# To break it in another way, leave out the line `optimizer.load_state_dict(...)` in resume().
# Then the momentum is lost, and only the job that was stopped ends with a different net. The
# message names its three runs.
#
# To break it in a third way, leave out the line `seed_generators(...)` in SeededItems.
# Then an item takes the random numbers that come next in its process. This fails even on one rank,
# because the loop seeds each item.
#
# To break it in a fourth way, replace `epoch + samples_read / len(train_set)` by `epoch` in
# train().
# Then the rate does not grow within an epoch. This, too, fails on one rank.
#
# The runs are tried from simple to hard, and the test stops at the first that differs. So if only
# this lesson fails, the message tells where to look. If it names one rank, look at the random
# numbers, the learning rate or the clipping. If it names several ranks, look at the loaders or
# their workers. If it names three runs, look at the checkpoint.
OPTIONS = "--epochs 2 --global-batch-size 12 --lr 0.2 --clip-grad-norm 0.3 --seed 5"
NUM_SAMPLES = 47  # Three batches of 12 an epoch. The other 11 samples are left out.


class Augmented(Ragged):
    """Signals of Ragged, scaled by random numbers from PyTorch, NumPy and Python."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (torch.rand(()) + np.random.rand() + random.random()), y


def make_augmented_task(args, device):
    """Return a task.

    With --micro-batch-size its net has no BatchNorm, because a layer would see only one micro-batch
    at a time.
    """
    net = plain_net() if args.micro_batch_size else ddp.ConvNet()
    # Each parameter has its own group, so a rate that is set in only one of them is noticed.
    groups = [{"params": [parameter]} for parameter in net.to(device).parameters()]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
    return Augmented(NUM_SAMPLES), Ragged(10), net, optimizer


def plain_loop(args, device):
    """In place of train(), on one rank: do in plain PyTorch what a job with OPTIONS must do.

    Besides the task and warm_up() only the seeding is ours: the random numbers must be the same.
    """
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = make_augmented_task(args, device)
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
            for group in optimizer.param_groups:
                group["lr"] = warm_up(args, epoch + step * batch_size / NUM_SAMPLES)
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
            for runs in ([Run(1)], [Run(2, num_workers=1)], [Run(3)], [Run(4)], stopped):
                # You can skip edit=WEIGHTS: it scales all labels alike, which changes no mean.
                net = net_after(options, runs, edit=WEIGHTS, make_task=make_augmented_task)
                what = f"The net differs from that of the plain loop, after {runs} with {options}"
                assert_close(net, expected, what)


# Not a part of the lesson: this edit gives each label the weight 0.001. A weight that all labels
# share cancels out of the mean, so the net must stay the same. (It would not with clamp(min=1) in
# train_step(), because the weights of a batch add up to less than 1.)
WEIGHTS = """
def batch_sums(*arguments, old=batch_sums):
    return old(*arguments) / 1000
"""


# How to test a new option (this is not a part of the lesson)
# 1. If plain PyTorch can repeat it in training, add it to OPTIONS and to plain_loop(). If whole
#    jobs without it must be tested, too, make it a string beside "--micro-batch-size 2" instead.
# 2. If it changes evaluation, or what is printed, give loss_and_accuracy() (Lesson 4) an argument
#    for it, with the default of the option. In the test of all printed numbers (Chapters 2 to 4)
#    add it to `options`, and its value to both calls of loss_and_accuracy().
# 3. If plain PyTorch cannot repeat it, as with --amp, write a test of its own in Chapters 2 to 4.
# 4. What main() refuses goes to COMMAND_LINES.
# 5. Have ddp_reference.py ignore it for a moment, first in training and then in evaluation. A test
#    must fail each time.
# 6. Run all tests. If one says that the README's diff shows other lines, you have changed a line
#    that the README quotes. Change it there, too.


# ------------------------------------------------------------------------------------------------
# Above is what ddp_reference.py guarantees of a training. Below are the other guarantees, by
# chapters: what is refused, printed and saved, and how the processes end. Many tests edit
# ddp_reference.py as you may edit your copy, by run_job(2, options, edit).

# ---- Chapter 1: the options
# Each line has options, blanks, "| " and a regular expression. main() must refuse the options with
# a message that the expression matches. If it accepts them, it trains a whole job before the test
# fails.
COMMAND_LINES = """
--nproc-per-node 7      | must be a multiple of the number of processes
--checkpoint-every 1    | --checkpoint-every needs --checkpoint
--checkpoint=           | --checkpoint is a folder
--checkpoint none/ck    | its folder is missing
--nproc-per-node 0      | invalid positive_int value
--epochs 0              | invalid positive_int value
--global-batch-size 0   | invalid positive_int value
--micro-batch-size -1   | invalid positive_int value
--checkpoint-every 0    | invalid positive_int value
--log-every 0           | invalid positive_int value
--timeout 0             | invalid positive_int value
--num-samples 0         | invalid positive_int value
--length -1             | invalid positive_int value
--num-workers -1        | cannot be below 0
--lr -1                 | cannot be below 0
--clip-grad-norm -1     | cannot be below 0
--seed -2               | cannot be below 0
"""


class Chapter1Options(TestCase):
    @classmethod
    def setUpClass(cls):
        start_slow_scripts()  # They run beside the other tests. TheProcesses waits for them.

    def assert_refused(self, pattern, options="", **environ):
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
        for options, pattern in re.findall(r"(--.*?) +\| (.*)", COMMAND_LINES):
            self.assert_refused(pattern, options)
        self.assert_refused("torchrun", RANK="0")
        self.assert_refused("torchrun", SLURM_STEP_NUM_TASKS="2")

    @unittest.skipIf(GPUS, "PyTorch sees the GPUs.")
    def test_gpus_that_pytorch_does_not_see_are_refused(self):
        """Otherwise the job would train on the CPU, and nobody would notice."""
        with mock.patch("os.path.exists", return_value=True):  # The driver's files are there.
            self.assert_refused("sees no GPU", CUDA_VISIBLE_DEVICES="0")
        with mock.patch("torch.cuda.device_count", return_value=1):
            # This file has is_available() ask only the driver. Here it must really start CUDA.
            self.assert_refused("CUDA does not start", PYTORCH_NVML_BASED_CUDA_CHECK="0")


# ---- Chapters 2 to 4: the sampler, the step and the loop
# Each line has a wrong call, and a regular expression that the message must match. The calls take
# the place of {} in TRAIN_WITH_WRONG_CALL.
WRONG_CALLS = """
train_step(net, optimizer, (x, y))                     | needs DistributedDataParallel
train_step(model, optimizer, {"x": x, "y": y})         | a batch must be tensors
train_step(model, optimizer, (x, ("a", "b")))          | a batch must be tensors
train_step(model, optimizer, (x.movedim(1, 0), y))     | with the sample as dimension 0
DistributedSampler(range(8), 2, rank=2)                | no rank 2 among 2
DistributedSampler(range(8), 2, rank=-1)               | no rank -1 among 2
DistributedSampler(range(8), 2, 0).set_epoch(0, 3)     | samples_read=3 is not a multiple of 2
"""


TRAIN_WITH_WRONG_CALL = """
def train(args, device):
    net, dataset = ConvNet().to(device), SyntheticDataset(4, 8, seed=0)
    x, y = next(iter(DataLoader(dataset, 4)))
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters())
    {}
"""


def make_plain_task(args, device):
    """Return a task with uneven labels, whose net is the same in training and in evaluation.

    The items of validation are random.
    """
    net = plain_net().to(device)
    return Ragged(48), Augmented(25), net, torch.optim.Adam(net.parameters())


class Chapters2To4(TestCase):
    def test_what_would_train_wrongly_is_refused(self):
        """DDP's wrapper is missing, a batch has another form, or a rank or a stop is impossible."""
        for wrong_call, pattern in re.findall(r"(.*?) +\| (.*)", WRONG_CALLS):
            with self.assertRaisesRegex(mp.ProcessRaisedException, pattern, msg=wrong_call):
                run_job(1, "", TRAIN_WITH_WRONG_CALL.format(wrong_call))

    def test_a_step_calls_two_collectives_and_never_item(self):
        """So a step of a small net waits for the other ranks twice, and never for its GPU."""
        edit = """
os.environ["KINETO_LOG_LEVEL"] = "9"  # Otherwise the profiler prints lines of its own.

def train(args, device, old=train):
    with torch.profiler.profile() as profile:
        old(args, device)
    print([event.name for event in profile.events()])
"""
        options = "--epochs 1 --micro-batch-size 2 --clip-grad-norm 1"
        # Reading a sample calls .item(), too. So both jobs read 42 samples, in 7 steps of 6 or in 3
        # of 14, and those calls cancel out. Adam on a CPU also calls it, so this task uses SGD.
        run_two = partial(run_job, 2, edit=edit, make_task=make_augmented_task)
        of_7_steps, _ = run_two(f"{options} --global-batch-size 6")
        of_3_steps, _ = run_two(f"{options} --global-batch-size 14")

        # The longer job has four more steps, so the difference is what four steps call.
        for operator, calls_of_4_steps in (("c10d::", 8), ("aten::item", 0)):
            calls = of_7_steps.count(operator) - of_3_steps.count(operator)
            assert calls == calls_of_4_steps, f"four steps call {operator} {calls} times"

    def test_ranks_steps_and_micro_batches_draw_their_own_numbers(self):
        """Dropout masks differ, also after a stop. With --amp all logits are bfloat16."""
        edit = """
seed_generators(0)
number = torch.rand(())
seed_generators(1)
assert number != torch.rand(()), "the seed is ignored"

def batch_sums(output, y, *others, old=batch_sums):
    assert output.dtype == torch.bfloat16, "--amp is ignored"
    if output.requires_grad:  # In training, draw a number as dropout would.
        assert torch.randint(2**16, ()) != np.random.randint(2**16), "PyTorch and NumPy draw alike"
        print("number", torch.rand(1, device=y.device).item())
    return old(output, y, *others)

# Items do not seed this process, as if a loader worker read them. Only the seeds of steps count.
def get_item(self, index):
    return self.dataset[index]

SeededItems.__getitem__ = get_item
"""
        options = f"{SMALL} --micro-batch-size 3 --amp --checkpoint drawn --checkpoint-every 1"
        ranks = run_job(2, options, edit, learning_rate=partial(stop_at, 1.3))
        ranks += run_job(2, options, edit)

        drawn = re.findall(r"number \S+", "".join(ranks))
        # 2 ranks make 8 steps of 2 micro-batches.
        assert len(set(drawn)) == len(drawn) == 32, f"these are not 32 different numbers: {drawn}"

    def test_all_printed_numbers_are_those_of_the_job(self):
        """They are so after a stop, too. Only rank 0 prints."""
        # With a learning rate of 0 the net stays what it is, so loss_and_accuracy() (Lesson 4)
        # tells its numbers. There is no folder `no`, so the path of the checkpoint works only
        # because main() resolves it.
        means = "loss {:.4f} accuracy {:.4f}".format(*loss_and_accuracy(plain_net(), Ragged(48)))
        all_means = means + " | val_loss {:.4f} val_accuracy {:.4f}".format(
            *loss_and_accuracy(plain_net(), ddp.SeededItems(Augmented(25), 1))
        )
        edit = """
class time:
    perf_counter = iter(range(0, 99, 2)).__next__  # It is two seconds later at each look.
"""
        options = f"{SMALL} --lr 0 --log-every 4 --checkpoint no/../numbers --checkpoint-every 2"
        run_three = partial(run_job, 3, edit=edit, make_task=make_plain_task)
        run_three(options, learning_rate=partial(stop_at, 0.7))

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


# ---- Chapter 6: checkpoints
# A fault has a line of options, "| " and a regular expression, and below it may have an edit, which
# ends at a blank line. Two ranks run it with SMALL, `--checkpoint ck` and its options. The fault
# must end the job with a message that the expression matches, and leave the file ck as it was.
# - ck is a sound checkpoint of this job, after both its epochs, so a job only resumes. A fault in
#   training or saving needs `--epochs 3`, or `--checkpoint new`, which does not exist, and must not
#   exist afterwards.
# - If no option is needed, write `--seed 0`, which changes nothing.
# - A damaged file is written in the test below, as the file `code` is.
FAULTS = """
--seed 99                | args.seed=0

--num-samples 60         | len.train_set.=48

--global-batch-size 24   | batch_size=12

--num-samples 6          | larger than the training set

--epochs 3 --lr inf      | the net is not finite, so nothing was written to .*ck

--seed 0                 | ck is damaged or of another job: .* in loading state_dict
class ConvNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(3, 3, 3, padding=1))

--seed 0                 | of a job with .*Adam
torch.optim.Adam = torch.optim.SGD

--checkpoint code        | Weights only load failed
# To load this file in the usual way is to run code.

--seed 0                 | do not all find
def train(args, device, old=train):
    if dist.get_rank():
        args.checkpoint = "none"
    old(args, device)

--checkpoint new         | the ranks have unequal data
def make_task(*arguments, old=make_task):
    task = old(*arguments)
    task[0].seed += dist.get_rank()
    return task

--checkpoint new         | the net is not finite
# A statistic of BatchNorm is infinite, though each parameter is finite.
def make_task(*arguments, old=make_task):
    task = old(*arguments)
    task[2][1].running_mean.fill_(torch.inf)
    return task

--checkpoint new         | size of tensor
# METRICS has two names, but here there is only one sum beside the number of labels.
def batch_sums(*arguments, old=batch_sums):
    return old(*arguments)[:2]

--epochs 3               | Resource temporarily unavailable, the other job has half a file
# Another job is writing the file.
def save_checkpoint(*arguments, old=save_checkpoint):
    with open("ck.tmp", "w") as other_job:
        other_job.write("half a file")
        other_job.flush()
        fcntl.flock(other_job, fcntl.LOCK_EX)
        try:
            old(*arguments)
        except BlockingIOError as error:
            raise RuntimeError(f"{error.strerror}, the other job has {open('ck.tmp').read()}")
"""


FLIP_BITS = """
def train(args, device):
    net = nn.Linear(30, 30)
    job = "flip", "identity", net, torch.optim.SGD(net.parameters())
    expected = net.weight.clone()
    save_checkpoint(*job, (0, 0, 0))
    with open("flip", "rb") as file:
        whole = file.read()
    for position in random.Random(0).sample(range(len(whole)), 300):
        net.weight.data.zero_()
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        with open("flip", "wb") as file:
            file.write(damaged)
        try:
            resume(*job)
        except ValueError:
            continue
        assert net.weight.equal(expected), f"a flip in byte {position} loads as other numbers"
"""


class Chapter6Checkpoints(TestCase):
    def test_a_fault_ends_the_job_and_leaves_the_checkpoint(self):
        """The message names the cause. The checkpoint keeps its bytes, or is not made."""
        path = pathlib.Path("ck")
        run_job(1, f"{SMALL} --checkpoint ck")
        intact = path.read_bytes()
        torch.save(os.system, "code")  # To load this is to import code.

        for fault in FAULTS.strip().split("\n\n"):
            title, _, edit = fault.partition("\n")
            options, pattern = re.split(r" +\| ", title)
            with self.assertRaisesRegex(mp.ProcessRaisedException, pattern, msg=fault):
                run_job(2, f"{SMALL} --checkpoint ck {options}", edit)
            assert path.read_bytes() == intact and not os.path.exists("new"), fault

    def test_no_flipped_bit_loads_as_other_numbers(self):
        """One bit flips in each of 300 bytes: the file is refused, or loads the same weights."""
        run_job(1, "", FLIP_BITS)

    def test_an_epoch_is_saved_before_its_line_is_printed(self):
        """So a kill after the line, or a full pipe, loses no epoch.

        A link stays a link, and what a killed job left of a file does no harm.
        """
        edit = """
def print(text):
    if text.startswith("epoch"):
        os._exit(0)
"""
        os.symlink("target", "link")
        pathlib.Path("target.tmp").write_text("half a file")

        run_job(1, f"{SMALL} --checkpoint link", edit)

        assert os.path.islink("link")
        assert torch.load("target")["progress"][:2] == (1, 0)


# ---- The README: what it shows is run
def readme_programs():
    """Return the programs of the README by name. A diff makes one from another one."""
    texts = dict(re.findall(r"(?ms)^```python (\S+)\n(.*?)^```", README))
    texts["ddp_reference.py"] = (HERE / "ddp_reference.py").read_text()
    diffs = re.findall(r"(?ms)^```diff (\S+) (\S+)\n(.*?)^```", README)
    # The diff from one.py to many.py is shown in parts, between others that begin at many.py.
    for old_name, name, diff in sorted(diffs, key=lambda diff: diff[0] != "one.py"):
        text = texts.get(name, texts[old_name])
        for hunk in re.split(r"(?m)^@@.*\n", diff):
            old = "".join(re.findall(r"(?m)^[ -](.*\n)", hunk))
            new = "".join(re.findall(r"(?m)^[ +](.*\n)", hunk))
            assert old in text, f"The README's diff of {name} shows other lines:\n{old}"
            text = text.replace(old, new)
        texts[name] = text
    return texts


def write_readme_programs():
    """Write the programs of the README into this folder, but not over a file that exists."""
    for name, text in readme_programs().items():
        if os.path.exists(name):
            print(f"{name} exists already, and is left as it is")
        elif name.endswith(".py"):
            pathlib.Path(name).write_text(text)
            print(f"wrote {name}")


def readme_program_lines(name, world_size):
    """Return the lines that a program of the README prints on so many ranks, but not its speed."""
    # Where there are fewer GPUs than ranks, the program must not see them.
    edit = "" if world_size <= GPUS else 'os.environ["CUDA_VISIBLE_DEVICES"] = ""'
    main = partial(exec, readme_programs()[name], {"__name__": "__main__"})
    # Only my_job.py reads the options.
    lines, *_ = run_job(world_size, "--epochs 3 --lr 0.1", edit, main=main)
    return re.sub(r"ddp on .*\n| \| [\d.]+ samples/s", "", lines)


class ReadmePrograms(TestCase):
    def test_each_step_from_one_gpu_to_many_is_needed(self):
        """With all five changes two processes print the lines of one. Without one they do not.

        The first cannot be left out. my_job.py, too, prints the same on one process and on two.
        """
        one = readme_program_lines("one.py", 1)
        self.assertEqual(readme_program_lines("my_job.py", 2), readme_program_lines("my_job.py", 1))
        for name in readme_programs():
            if re.match("many|still|dp", name):  # These print what one.py prints.
                self.assertEqual(readme_program_lines(name, 2), one, name)
            if name.startswith("without"):
                lines = readme_program_lines(name, 2)
                self.assertNotEqual(lines, one, name)
                self.assertIn(f"**{lines[-7:-1]}**", README, name)

    def test_stock_ddp_depends_on_the_ranks_and_ours_does_not(self):
        """The table of the README: the last numbers on 1, 2 and 4 processes."""
        for job in ("labels", "batchnorm", "augmented", "stopped"):
            rows = []
            for name in (f"{job}.py", f"{job}_ours.py"):
                # The last number, such as 0.9862, stands before the end of the line.
                rows.append(
                    " ".join(readme_program_lines(name, ranks)[-7:-1] for ranks in (1, 2, 4))
                )
            stock, ours = rows
            self.assertIn(f"| {stock} | {ours} |", README, job)
            assert len(set(ours.split())) == 1 and stock != ours, job

    def test_shards_train_as_their_samples_do_or_are_refused(self):
        """A tar file is refused if it lacks x or y, holds links or sparse files, or is cut off."""
        path = pathlib.Path("a.tar")
        dataset = ddp.SyntheticDataset(48, 64, seed=0)
        with tarfile.open(path, "w") as tar:
            for index in range(48):
                for name, array in zip(("x.npy", "y.npy"), dataset[index]):
                    np.save(name, array)
                    tar.add(name, f"{index}.{name}")
        edit = readme_programs()["shards.py"]
        options = f"{SMALL} --shards a.tar --val-shards a.tar"

        net = net_after(options, [Run(2)], edit=edit)
        assert_close(net, net_after(SMALL, [Run(2)]), "From shards the net is another one.")

        # After 15 samples, of 5120 bytes each, one file is cut off, and the other one goes on with
        # something else.
        intact = path.read_bytes()
        contents = [intact[:76800], intact[:76800] + b"?" * 2000]
        # Beside x or y, the other one is a folder (which does not count), a link or a sparse file.
        kinds = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE
        for kind, (plain, odd) in product(kinds, ("xy", "yx")):
            with tarfile.open(path, "w") as tar:
                tar.addfile(tarfile.TarInfo(f"a.{plain}.npy"))
                member = tarfile.TarInfo(f"a.{odd}.npy")
                member.type = kind
                tar.addfile(member)
            contents.append(path.read_bytes())
        for content in contents:
            path.write_bytes(content)
            with self.assertRaisesRegex(mp.ProcessRaisedException, "a.tar is damaged or lacks"):
                run_job(1, options, edit)


# ---- Chapters 5 and 9: the processes (the class has a name by which unittest runs it last)
PROCESS_SCRIPTS = {
    "failing.py": """
import atexit, os, signal
import ddp_reference as ddp

def train(args, device):
    atexit.register(signal.pause)  # So this rank hangs while it ends.
    raise RuntimeError("the cause")

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
ddp.train = train
ddp.main()
""",
    "hanging.py": """
import os, signal
import torch._dynamo  # PyTorch would import this in the first step, which would take seconds.
import ddp_reference as ddp

rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]

def learning_rate(args, epochs_done):
    if epochs_done > 1.3 and (rank, restarts) == ("0", "0"):
        print("gloo on", os.environ["GLOO_SOCKET_IFNAME"], "workers by", ddp.mp.get_start_method())
        signal.pause()
    return args.lr

def evaluate_or_hang(*arguments, evaluate=ddp.evaluate):
    if (rank, restarts) == ("1", "1"):
        signal.pause()
    return evaluate(*arguments)

ddp.learning_rate = learning_rate
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

def get_stuck(dataset, index, old=ddp.SyntheticDataset.__getitem__):
    if get_worker_info():  # The rank itself reads an item for the identity.
        print("stuck", flush=True)
        signal.pause()
    return old(dataset, index)

ddp.SyntheticDataset.__getitem__ = get_stuck
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
    out, err = program.communicate(timeout=90)
    assert program.returncode == status, f"status {program.returncode}: {err}"
    return out, err


@cache
def start_slow_scripts():
    """Write PROCESS_SCRIPTS, and start three of them and the main job, once: they take long."""
    for name, text in PROCESS_SCRIPTS.items():
        pathlib.Path(name).write_text(text)
    torchrun = "--standalone --local-addr=127.0.0.1 --nproc-per-node=2 --max-restarts=2"
    job = f"hanging.py {SMALL} --timeout 8 --checkpoint hanging --checkpoint-every 1"
    return {
        "hanging": start_python(f"-m torch.distributed.run {torchrun} {job}"),
        # PyTorch sends a rank SIGINT when its launcher ends. Here this is ignored.
        "orphan": start_python("orphan.py --nproc-per-node 1", signal.SIG_IGN),
        "failing": start_python("failing.py"),
        "main job": start_python("-m ddp_reference"),
    }


class TheProcesses(TestCase):
    def test_the_main_job_prints_what_the_readme_shows(self):
        """Its losses and accuracies may differ by rounding only. The sampler does not warn."""
        out, err = wait_for(start_slow_scripts()["main job"])

        kind = f"nccl, world size {GPUS}, cuda" if GPUS else "gloo, world size 2, cpu"
        self.assertIn(f"ddp on {kind}, global batch size 240, torch ", out)
        printed, shown = ([float(n) for n in re.findall(r"0\.\d{4}", s)] for s in (out, README))
        # TF32 is not off here.
        assert_close(printed, shown[:24], "A number is not the README's.", tolerance=0.005)
        assert "set_epoch" not in err  # The sampler warns of a second pass only.

    def test_the_watchdog_restarts_at_each_batch_and_is_stopped(self):
        """It starts before train(), and is stopped at the end."""
        edit = """
class faulthandler:
    def dump_traceback_later(seconds, exit):
        print("started", seconds, exit)

    def cancel_dump_traceback_later():
        print("stopped")
"""
        printed, _ = run_job(2, f"{SMALL} --epochs 1 --num-samples 12", edit)

        # On rank 0: at the start, at one batch of training, at three of validation (13 samples).
        self.assertRegex(
            printed, r"^started 60.0 False\nddp.*\n(started.*\n){4}epoch.*\nstopped\n$"
        )

    def test_no_process_is_left_when_the_launcher_alone_ends(self):
        """None is left even if it ignores Ctrl-C, as after &, or if a loader worker is stuck."""
        out, _ = wait_for(start_slow_scripts()["orphan"], -signal.SIGKILL)
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
        out, err = wait_for(start_slow_scripts()["hanging"])

        times = re.findall(r"Timeout \((.*)\)!", err)
        self.assertEqual(times, ["0:00:08", "0:00:10.500000"] * 2)  # Rank 1 waits longer.
        for function in ("learning_rate", "train_step", "evaluate", "evaluate_or_hang"):
            assert f" in {function}\n" in err, err
        assert "gloo on lo workers by spawn\n" in out, out  # A forked worker may hang.
        # This ends the line "resuming .../hanging at ...". The checkpoint's name is hanging.
        assert "hanging at epoch 1/2, sample 24" in out

    def test_the_cause_is_told_if_a_failed_rank_hangs_at_its_end(self):
        """NCCL may keep a failed rank from ending. After 30 seconds it is ended."""
        _, err = wait_for(start_slow_scripts()["failing"], status=1)

        self.assertRegex(err, r"RuntimeError: the cause\n(?s:.*)Timeout \(0:00:30\)!")


def main():
    """Run the tests, and end with `N passed, N failed, N skipped`. Or write the programs."""
    if sys.argv[1:] == ["programs"]:
        return write_readme_programs()
    result = unittest.main(exit=False, verbosity=2).result
    failed = len(result.failures + result.errors)
    skipped = len(result.skipped)
    passed = result.testsRun - failed - skipped
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed > 0 or not result.testsRun)  # -k may name no test.


if __name__ == "__main__":
    main()
