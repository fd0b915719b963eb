"""The guarantees of ddp_reference.py, and a command that tries them on your own job.

    bash run.sh test                 # all tests
    bash run.sh check my_job.py      # is this job the same on any number of processes?

First come six lessons. Each compares what ranks do with something simpler, such as one process with
the whole batch. Read the docstring of ddp_reference.py, which explains the words, and before each
lesson what its title names in brackets.

"To break it" names a line of ddp_reference.py (in Lesson 0, of this file). Cover what follows
"Then", and predict it. Change the line, run the lesson (`bash run.sh test -k Lesson2`), read its
message, and undo the change. `bash run.sh` shows none of the faults of Lessons 1 to 5. GPUs may
give other numbers.
"""

import contextlib
import ctypes
import io
import logging
import os
import random
import re
import runpy
import signal
import socket
import sys
import tarfile
import tempfile
import time
import unittest
import warnings
from argparse import REMAINDER, ArgumentParser
from collections import Counter
from functools import cache, partial
from itertools import product, zip_longest
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
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

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
TORCHRUN = "-m torch.distributed.run --standalone --local-addr=127.0.0.1"
SOURCE = Path(ddp.__file__).read_text()
os.environ |= {
    "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or torchrun's restarts may hang
    "NVIDIA_TF32_OVERRIDE": "0",  # TF32 rounds more than a CPU.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # Counting GPUs must not start CUDA: ranks are forked.
    "KINETO_LOG_LEVEL": "9",  # or the profiler prints
}
GPUS = torch.cuda.device_count()
FAILED = mp.ProcessExitedException, mp.ProcessRaisedException  # Another rank may raise first.


def setUpModule():
    """Work in an empty folder, and start the slow programs, which run beside the tests."""
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    unittest.addModuleCleanup(os.chdir, HERE)
    os.chdir(folder.name)
    os.environ["TMPDIR"] = folder.name  # Programs that are killed leave files there.
    logging.disable()  # PyTorch would log each rank that it ends.
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Otherwise & turns Ctrl-C off.
    if "-k" not in sys.argv:  # With -k, a test starts what it needs.
        for name in SLOW_PROGRAMS:
            start(name)


# ---- Lesson 0: the machine
# Can this machine add? In training a wrong sum passes for noise, but one of integers shows.
# Here run_job(), far below, starts a rank for each GPU, but at least two. Rank r lists r, r + 1,
# r + 2 and so on. With W ranks the sum at index i must be W * i + (0 + 1 + ... + W - 1).
#
# To break it, leave out `dist.all_reduce(total)` below. How many sums are wrong?
# Then rank r of 2 has i + r, not 2 * i + 1: all are wrong on rank 0, and all but one on rank 1.
def add_up_integers(args, device):
    """In place of train(): count the sums that are wrong."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    integers = torch.arange(2**24, dtype=torch.int32, device=device)
    expected = world_size * integers + sum(range(world_size))
    total = integers + rank
    dist.all_reduce(total)
    wrong = (total != expected).sum().item()
    print(f"rank {rank} of {world_size} on {device}: {wrong} of {len(total)} sums are wrong")


class Lesson0Machine(TestCase):
    def test_all_ranks_add_up_integers_exactly(self):
        ranks = max(GPUS, 2)
        printed = "".join(run_job(ranks, f"--global-batch-size {ranks}", train=add_up_integers))
        self.assertEqual(printed.count(": 0 of"), ranks, printed)
        print(printed)


# ---- Lesson 1: which samples a rank reads (DistributedSampler)
# All ranks shuffle alike, anew each epoch (set_epoch). The samples are then dealt like cards, one
# to each rank in turn. So a step that takes the next 12 has the same samples on 1 to 4 ranks.
# One process plays all ranks.
#
# To break it, leave out `+ self.rank` in DistributedSampler. What do two ranks read?
# Then both read rank 0's samples: half of all, each twice.
class Lesson1Sampler(TestCase):
    def test_a_step_has_the_same_samples_on_any_number_of_ranks(self):
        dataset = range(24)
        torch_sampler = TorchSampler(dataset, num_replicas=1, rank=0)
        torch_sampler.set_epoch(3)
        order = list(torch_sampler)
        for ranks, samples_read in product(range(1, 5), (0, 12)):  # 12: stopped after one step
            samplers = [ddp.DistributedSampler(dataset, ranks, rank) for rank in range(ranks)]
            for sampler in samplers:
                sampler.set_epoch(3, samples_read)
            dealt = [sample for turn in zip(*samplers) for sample in turn]
            expected = order[samples_read:]
            assert dealt == expected, f"{ranks=}, {samples_read=}: {dealt}, not {expected}"
            assert len(samplers[0]) * ranks == len(dealt)


# ---- Used in Lessons 2 to 5: a comparison, data, a net and a job
OPTIONS = "--epochs 2 --global-batch-size 12 --lr 0.1 --seed 5"  # Later ones win.


def assert_close(actual, expected, what, tolerance=2e-5):
    """Assert that numbers or tensors are equal, by default up to the rounding of float32."""
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{text}\n{what}"
    )


class Ragged(ddp.SyntheticDataset):
    """Signals, scaled by random numbers. The first 0, 10, 20, 30 or 40 labels are -100: ignored."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        y[: index % 5 * 10] = -100
        self.file = lambda: None  # Like an open file, it cannot be pickled.
        return x * (torch.rand(()) + np.random.rand() + random.random()), y


def plain_net():
    """Return a net without BatchNorm, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 1))


def make_task_with(make_net, train_set, args, device):
    """In place of make_task(): return a task with 25 signals to evaluate on."""
    net = make_net().to(device)
    first, *others, _ = net.parameters()  # The last one is not trained.
    groups = [{"params": [first], "lr": 2 * args.lr}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, weight_decay=0.1)
    return train_set, Ragged(25, 40, seed=1), net, optimizer


def saved_net(ranks, options, make_net, train_set, **replacements):
    """Run a job with this task, and return the state of the net that it saves."""
    replacements["make_task"] = partial(make_task_with, make_net, train_set)
    run_job(ranks, f"{OPTIONS} --checkpoint saved {options}", **replacements)
    net = torch.load("saved", map_location="cpu")["net"]
    os.remove("saved")  # The next job begins anew, unless this one was killed.
    return net


# ---- Lesson 2: a step (batch_sums, forward, train_step for one share)
# A step must move the net as one process with the whole batch would, even if ranks have
# different numbers of labels. Let rank 0 have one label of loss 7, and rank 1 three of loss 3. The
# mean is (7 + 9) / 4 = 4, but the mean of the ranks' means, as in tutorials, is (7 + 3) / 2 = 5.
# So train_step() first counts the 4 labels by an all-reduce. It multiplies each rank's sum of
# losses by 2 ranks / 4 labels, which makes 3.5 and 4.5. DDP averages their gradients, and the
# average of 3.5 and 4.5 is 4.
#
# To break it, let each rank take its own mean: replace `sums[1] * scale` by `sums[1] / sums[0]`.
# In the first step two ranks have 110 and 160 labels. What weight does the loss of a label get?
# Then it is 1/110 or 1/160, halved by DDP, not 1/270. After two steps 0.bias is up to 0.0006 off.
def tutorial_step(model, optimizer, shares, seed, *_):
    """In place of train_step(): take a tutorial's step, which is right on one rank."""
    # For Lesson 4: rank r draws share r's numbers, and DDP broadcasts buffers.
    ddp.seed_generators(*seed, dist.get_rank())
    model.broadcast_buffers = True
    x, y = (tensor.to(model.device) for tensor in shares[0])
    F.cross_entropy(model(x), y).backward()  # mean over this rank's labels
    optimizer.step()
    optimizer.zero_grad()
    return 0  # instead of sums


class Lesson2Step(TestCase):
    def test_a_step_is_that_of_one_process_with_the_whole_batch(self):
        task = plain_net, Ragged(12, 40, seed=0)
        expected = saved_net(1, "", *task, train_step=tutorial_step)
        # Without --shares, each rank has one. Of 12 shares two lack labels.
        jobs = product(("", "--shares 12"), range(1, 5))
        for options, ranks in *jobs, ("--shares 2 --num-workers 1", 1):
            net = saved_net(ranks, options, *task)
            assert_close(net, expected, f"on {ranks} ranks {options}")


# ---- Lesson 3: evaluation (sync_buffers, evaluate)
# The printed loss and accuracy must be those of the saved net in one process with all samples. A
# DistributedSampler would repeat some. Instead, batches as large as a share are dealt. With steps
# of 12 on 2 ranks, 25 samples make batches of 6, 6, 6, 6 and 1: rank 0 gets three, rank 1 two. With
# 36 on 4, they make 9, 9 and 7: rank 3 gets none. A collective in the loop would fail or hang. Each
# rank adds up its losses and labels. One all-reduce after the loop adds up these sums.
#
# BatchNorm evaluates with running means and variances. All ranks begin a step with those of rank 0,
# and each moves them towards its samples'. Rank 0's are saved, so evaluate() gives them to all.
#
# To break it, leave out `sync_buffers(net)` in evaluate(). With steps of 12, how many of the 25
# samples are evaluated with buffers that are not the saved net's, on 1 rank and on 2?
# Then on 1 rank none are. On 2 ranks rank 1's 12 are, so the job prints 1.0420, not 1.0415.
def net_with_state():
    """Return a net that trains with batch statistics, buffers of its own and random numbers."""
    # spectral_norm() divides the weight by its norm, which training estimates in buffers.
    conv = nn.utils.parametrizations.spectral_norm(nn.Conv1d(3, 3, 3, padding=1))
    layers = [nn.BatchNorm1d(3), conv, nn.ReLU(inplace=True), plain_net()]
    return nn.Sequential(*layers, nn.BatchNorm1d(3), nn.Dropout(0.1))


def loss_and_accuracy(net, dataset):
    """Return the mean loss and the accuracy over all labels."""
    x, y = default_collate([*dataset])
    logits = net.eval()(x)
    accuracy = (logits.argmax(1) == y).sum() / (y != -100).sum()
    return [F.cross_entropy(logits, y).item(), accuracy.item()]


class Lesson3Evaluation(TestCase):
    def test_loss_and_accuracy_are_those_of_one_process_with_the_saved_net(self):
        train_set, net = Ragged(36, 40, seed=0), net_with_state()
        for ranks, batch_size in product(range(1, 5), (12, 36)):
            options = f"--epochs 1 --global-batch-size {batch_size}"
            state = saved_net(ranks, options, net_with_state, train_set)
            net.load_state_dict(state)

            printed = re.findall(r"val_\w+ (\S+)", Path("rank0").read_text())  # by rank 0

            val_set = ddp.SeededItems(Ragged(25, 40, seed=1), seed=6)  # as in train()
            expected = loss_and_accuracy(net, val_set)
            assert_close([*map(float, printed)], expected, f"{ranks=}, {batch_size=}", 1e-4)


# ---- Lesson 4: shares (make_loaders, train_step's loop)
# Many nets look at several samples at once: of the values 1 and 5, BatchNorm makes -1 and 1, but
# -1.4 and 1.4 if 3 and 3 are with them. Many draw random numbers, as dropout does. So what is
# computed together, or drawn, must not depend on the number of ranks: a step always has, say, 4
# shares. On 4 ranks each rank computes one, as with DDP alone. On 2, rank 0 computes shares 0 and
# 2, and rank 1 shares 1 and 3. On any number, share s has the samples and random numbers of rank s
# of 4. Each begins with the buffers that share 0 left in the step before.
#
# On 4 ranks the net must be, bit for bit, that of tutorial_step(), which is right if all shares
# have equally many labels, as here. On 2 and 1 only rounding differs.
#
# To break it, replace `index * world_size` in train_step() by `0`. Which of 4, 2 and 1 ranks fail?
# Then 2 and 1 fail, as all shares of a rank drop the same logits. 4 pass: each has only index 0.
class Lesson4Shares(TestCase):
    def test_four_shares_on_any_number_of_ranks_train_as_stock_ddp_on_four(self):
        task = net_with_state, ddp.SyntheticDataset(48, 40, seed=0)
        expected = saved_net(4, "--shares 4", *task, train_step=tutorial_step)
        for ranks, tolerance in (4, 0), (2, 2e-5), (1, 2e-5):
            net = saved_net(ranks, "--shares 4", *task)
            with self.subTest(ranks=ranks):
                assert_close(net, expected, "", tolerance)


# ---- Lesson 5: the number of ranks, and stops (train, resume)
# A job with augmentation (Ragged), BatchNorm, dropout, a warm-up, clipping, uneven labels and two
# learning rates must end with the net of plain_loop(), even if 3 ranks begin it, 2 resume it after
# a kill, and 1 after another. It does, because
# - a step's samples (Lesson 1), gradient (2) and shares (4) are the same on any number of ranks,
# - random numbers follow from the seed, the epoch, and the item, or the samples read and the share,
# - the learning rate follows from the epoch and the count of samples read,
# - the checkpoint holds this epoch and count, the net and the optimizer.
#
# To break it, let train() call `resume(path, identity, {"net": net})`. What begins anew, the
# warm-up, the order of samples, the momentum?
# Then only the momentum does, which the optimizer holds: 0.bias is up to 0.011 off.
def stop_at(stop_after, args, epochs_done):
    """In place of lr_factor(): warm up, and let rank 0 be killed after so many epochs."""
    if epochs_done >= stop_after and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.float64(min(1, epochs_done + 0.1))  # as a NumPy number, too


def plain_loop(args, device):
    """In place of train(): train without DDP, in one process with all shares."""
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = ddp.make_task(args, device)
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    sampler = TorchSampler(train_set, seed=args.seed)
    batches = BatchSampler(sampler, args.global_batch_size, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, indices in enumerate(batches):
            samples_read = step * args.global_batch_size
            for group, lr in zip(optimizer.param_groups, base_lrs):
                group["lr"] = lr * ddp.lr_factor(args, epoch + samples_read / len(train_set))
            samples = []
            for index in indices:
                ddp.seed_generators(args.seed, epoch, index)
                samples.append([tensor.to(device) for tensor in train_set[index]])
            num_labels = sum((y != -100).sum() for _, y in samples)
            buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
            for share in reversed(range(args.shares)):  # Share 0 is last, so its buffers remain.
                net.load_state_dict(buffers, strict=False)
                ddp.seed_generators(args.seed, epoch, samples_read, share)
                x, y = default_collate(samples[share :: args.shares])
                (F.cross_entropy(net(x), y, reduction="sum") / num_labels).backward()
            nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad_norm)
            optimizer.step()
            net.zero_grad()
    torch.save({"net": net.state_dict()}, args.checkpoint)


class Lesson5NumberOfRanks(TestCase):
    def test_a_job_ends_as_a_plain_loop_does(self):
        train_set = Ragged(47, 40, seed=0)  # 3 steps an epoch, 11 left
        task = {"make_net": net_with_state, "train_set": train_set}
        run = partial(saved_net, **task, lr_factor=partial(stop_at, np.inf))  # never killed
        options = "--shares 6 --clip-grad-norm 0.3 --checkpoint-every 1"
        expected = run(1, options, train=plain_loop)
        # Steps 3 and 5 of the six begin at 24/47 and 1 + 12/47. So each job takes two steps.
        for ranks, stop_after in (3, 0.5), (2, 1.2):
            with self.assertRaises(FAILED):
                run(ranks, options, lr_factor=partial(stop_at, stop_after))
        assert_close(run(1, options), expected, "after two kills")
        self.assertIn("epoch 1/2, sample 12\n", Path("rank0").read_text())


# ---- The other guarantees: what is refused, printed and saved
# A new option that changes a step goes into Lesson 5's options and plain_loop(). If it also changes
# printed numbers, it goes into loss_and_accuracy() and test_all_printed_numbers. Any other, and one
# that make_task() reads, gets a test of its own. Then leave it out of one call after the other,
# and each option beside it, which it may hide: each time a test must fail.
def be_rank(rank, world_size, port, options, replacements):
    """Be one rank of a job: run main() as if torchrun had started this process."""
    mp.set_start_method(None, force=True)  # torchrun sets none.
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Ranks may share GPUs.
    # Local ranks are reversed, so mistaking them for ranks fails.
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{world_size - 1 - rank}"}
    os.environ |= {"WORLD_SIZE": f"{world_size}", "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": f"{port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # of run_job()
    vars(ddp).update(replacements)
    sys.argv = ["ddp_reference.py", *f"--timeout 60 --shares {world_size} {options}".split()]
    with open(f"rank{rank}", "w") as out, contextlib.redirect_stdout(out):
        ddp.main()
    assert not dist.is_initialized()


def run_job(world_size, options="", **replacements):
    """Run a job on so many ranks, by default with a share for each: return what each rank printed.

    replacements: in place of names in ddp_reference.py. They are pickled, so functions must be at
    the top level.
    """
    # The ranks are forked from a process that has done the slow imports.
    mp.set_forkserver_preload(["ddp_reference", "torch._dynamo"])
    # The port is opened here, because a store that opens its own listens on all networks.
    server = socket.create_server(("localhost", 0))
    store = dist.TCPStore(*server.getsockname(), is_master=True, master_listen_fd=server.detach())
    arguments = world_size, store.port, options, replacements
    mp.start_processes(be_rank, arguments, world_size, start_method="forkserver")
    return [Path(f"rank{rank}").read_text() for rank in range(world_size)]


def edited(text, *edits):
    """Return a program in which texts are replaced. edits: old, new and so on."""
    for old, new in zip(edits[::2], edits[1::2]):
        assert text.count(old) == 1, f"not once in the program: {old}"
        text = text.replace(old, new)
    return text


def run_edited(world_size, options, *edits, text=SOURCE):
    """Run a program, with edits, on so many ranks: return what each rank printed."""
    Path("program.py").write_text(edited(text, *edits))
    run_program = partial(runpy.run_path, "program.py", run_name="__main__")
    return run_job(world_size, options, main=run_program)


# A small job with four steps an epoch.
SMALL = "--num-samples 48 --length 64 --epochs 2 --global-batch-size 12 --shares 12"

ADAM = "Adam(net.parameters()"
NET = "net = ConvNet().to(device)"
WRAP = "model = DistributedDataParallel(net)"
NEW = "--checkpoint new"
# (options, pattern, old, new): with --checkpoint ck, these options and edits, two ranks must fail
# with this pattern, leave ck as it was, and not write the file new.
FAULTS = (
    (
        "--seed 9 --num-samples 60 --global-batch-size 24 --shares 6",
        "seed=0.*=12.*=12.*=48.*data=.*SUMS=.*accuracy.*optimizer Adam, parameters=",
        *('"accuracy")', '"top1")', ADAM, "SGD(reversed([*net.parameters()])"),
    ),
    ("--num-samples 6", "larger than the training set"),
    ("--lr inf", "holds a nan, so nothing was written to .*ck"),
    ("--checkpoint code", "Weights only load failed"),
    ("--checkpoint flipped", "cannot resume from .*flipped: .*a checksum is wrong"),
    ("", "that the net lacks", ADAM, "Adam([nn.Parameter(torch.ones(()))]"),
    ("", "an item differs", "dataset[index]", "dataset[index][0].mul_(2),"),
    (NEW, r"to .*new: (.|\n)*numpy", ADAM, f"{ADAM}, eps=np.float64(1)"),
    ("", r"or lack .*\(0, 0\).*\(2, 0\)", "= resume(path", "= resume(path + 'x' * rank"),
    (NEW, "data.*'data=.*'data=", "dataset[index]", "dataset[index][0], dist.get_rank()"),
    (NEW, "or net.*num_batches_tracked", "*layers[:-1]", "*layers[: -1 - dist.get_rank()]"),
    ("", "ranks' 0.weight differ", WRAP, f"{WRAP}; net[0].weight.data += rank"),
    ("", r"needs DistributedDataParallel\(net\)", WRAP, "model = net"),
    ("", "shares must be batches", "zip(*train_loaders)", "[[[0]]]"),
    ("", "shares must be batches", "zip(*train_loaders)", "[(torch.ones(2), torch.ones(2))]"),
    ("", r"No space left(.|\n)*nothing was written to .*ck", "open(temporary", "open('/dev/full'"),
    ("", "with signal SIGINT", "    return 1", "    signal.raise_signal(signal.SIGINT)"),
)

JOIN = '"collate_fn": lambda items: [torch.stack(x) for x in list(zip(*items))[2:]], "pin_memory"'
MASK = "net.register_buffer('mask', torch.full((3, 2), -torch.inf, device=device)[:, 0])"
TEXT = "ConvNet.get_extra_state = ConvNet.set_extra_state = lambda *_: 'text'"
CACHE = "net.register_buffer('cache', torch.ones(2 - rank), persistent=False)"
# (checkpoint, edits): with these edits two ranks must train with --amp, and save.
UNUSUAL = (
    (
        "items-joined-by-the-user",
        *("return self.dataset[index]", "return 'text', None, *self.dataset[index]"),
        *('"pin_memory"', JOIN),
    ),
    (
        "bfloat16-summed-in-float32",
        *("output =", "assert output.dtype == torch.bfloat16; output ="),
        *("loss = F", "assert output.dtype == torch.float32; loss = F"),
    ),
    ("no-labels", "(y != -100).sum()", "0 * y.sum()", "loss.double()", "0 * loss.double()"),
    ("copies-apart-by-rounding", WRAP, f"{WRAP}; net[0].weight.data *= 1 + 1e-5 * rank"),
    ("infinite-mask", NET, f"{NET}; {MASK}"),
    ("text-as-state", NET, f"{NET}; {TEXT}"),
    ("unsaved-buffer-of-unequal-size", WRAP, f"{WRAP}; {CACHE}"),
    (
        "another-job-saves-meanwhile",
        *("os.fsync(file)", "progress and save_checkpoint(path, identity, parts, None)"),
    ),
)


def profiled(batches, timeout, watched=ddp.watched):
    """In place of watched(): also print what is called while the batches are used."""
    with torch.profiler.profile() as profile:
        yield from watched(batches, timeout)
    print([event.name for event in profile.events()])


class OtherGuarantees(TestCase):
    def test_the_sampler_reads_what_pytorchs_does(self):
        """Our permutation of int32 is PyTorch's of int64, also beyond 16 bits."""
        settings = product((*range(20), 70000), range(1, 7), (True, False), (True, False))
        for num_samples, num_replicas, shuffle, drop_last in settings:
            for rank in range(num_replicas):
                arguments = range(num_samples), num_replicas, rank, shuffle, 7, drop_last
                ours, theirs = ddp.DistributedSampler(*arguments), TorchSampler(*arguments)

                # Compare texts, because np.int32(3) equals 3.
                assert f"{list(ours)}" == f"{list(theirs)}", arguments
                assert vars(theirs).items() <= vars(ours).items(), arguments

        for rank, samples_read in ((2, 0), (-1, 0), (1, 3)):
            with self.assertRaises(ValueError):
                ddp.DistributedSampler(range(8), 2, rank).set_epoch(0, samples_read)

    def test_what_cannot_work_is_refused_in_one_line(self):
        for options, variables, pattern in (
            ("--nproc-per-node 7", {}, "try --shares 7 --global-batch-size 245"),
            # All numbers up to 8 divide 1680.
            ("--shares 1680", {}, f"try --shares {GPUS or 2} --global-batch-size"),
            ("--checkpoint-every 1 --global-batch-size 1680", {}, "every needs --checkpoint"),
            ("--epochs 0", {}, "invalid positive_int value"),
            ("", {"RANK": "0"}, "start torchrun"),
            ("", {"LOCAL_RANK": "0"}, "start torchrun"),
        ):
            sys.argv = ["ddp_reference.py", *options.split()]
            with (
                mock.patch.dict(os.environ, variables),
                mock.patch("sys.stderr", io.StringIO()) as err,
                self.assertRaisesRegex(SystemExit, "^2$", msg=pattern),
            ):
                ddp.main()
            self.assertRegex(err.getvalue(), f"^.*: error: .*{pattern}.*\n$")

    def test_a_fault_ends_the_job_and_leaves_the_checkpoint(self):
        run_job(2, f"{SMALL} --checkpoint ck")
        intact = Path("ck").read_bytes()
        flipped = bytearray(intact)
        flipped[len(flipped) // 2] ^= 1  # The middle lies in a tensor.
        Path("flipped").write_bytes(flipped)
        torch.save(os.system, "code")  # To load this is to import code.

        for options, pattern, *edits in FAULTS:
            with self.assertRaisesRegex(FAILED, pattern, msg=pattern):
                run_edited(2, f"{SMALL} --epochs 3 --checkpoint ck {options}", *edits)
            assert Path("ck").read_bytes() == intact and not os.path.exists("new"), pattern

    def test_a_step_calls_four_collectives_and_never_item(self):
        """They are for the count of labels, the buffers, the gradients and the sums."""
        stopped = partial(print, "stopped")
        (printed,) = run_job(
            1,
            f"{SMALL} --shares 2 --clip-grad-norm 1",
            make_task=partial(make_task_with, net_with_state, Ragged(48, 40, seed=0)),
            watched=profiled,
            restart_watchdog=partial(print, "restarted"),
            faulthandler=SimpleNamespace(enable=print, cancel_dump_traceback_later=stopped),
        )
        last_epoch = printed.partition("\nepoch 0 | ")[2]  # of 4 steps, and 5 batches of validation
        self.assertEqual(last_epoch.count("c10d::"), 4 * 4)
        # .item() is called for each of 48 + 25 samples read, and when validation's loader starts.
        self.assertEqual(last_epoch.count("aten::item"), 73 + 1)
        self.assertEqual(printed.count("restarted"), 1 + 2 * (4 + 5))  # 1 before any batch
        assert printed.endswith("\nstopped\n")

    def test_all_places_and_generators_draw_their_own_numbers(self):
        drawn = set()
        for place in product(range(3), repeat=3):
            ddp.seed_generators(*place)
            drawn |= {random.random(), np.random.randint(2**16), torch.randint(2**16, ()).item()}
        self.assertEqual(len(drawn), 3 * 27)

    def test_unusual_jobs_are_not_refused(self):
        for what, *edits in UNUSUAL:
            options = f"{SMALL} --shares 2 --amp --checkpoint {what}"
            with self.subTest(what):
                self.assertIn("\nepoch 1 |", run_edited(2, options, *edits)[0])

    def test_all_printed_numbers_are_those_of_the_job(self):
        # With a learning rate of 0 the net stays what it is.
        net = plain_net()
        train_set = ddp.SeededItems(Ragged(48, 40, seed=0), seed=0)
        val_set = ddp.SeededItems(Ragged(25, 40, seed=1), seed=1)
        assert val_set.epoch.is_shared()
        os.symlink("target", "link")  # A link stays a link.
        options = f"{SMALL} --lr 0 --log-every 4 --checkpoint link --checkpoint-every 2"
        clock = SimpleNamespace(perf_counter=iter(range(0, 99, 2)).__next__)  # 2 seconds a look
        make_task = partial(make_task_with, plain_net, train_set.dataset)
        run_three = partial(run_job, 3, make_task=make_task, time=clock)
        # The first run saves --lr 1, which must not come back, and ends before its first step.
        for more, stop_after in (("--lr 1", 0), ("", 0.7)):
            with self.assertRaises(FAILED):
                run_three(f"{options} {more}", lr_factor=partial(stop_at, stop_after))
            assert os.path.exists("target")

        printed = "".join(run_three(options))  # Only rank 0 may print.

        # Step 2 was saved, so 24 samples are left.
        expected = f"\nresuming {os.path.realpath('target')} at epoch 0/2, sample 24\n"
        val = "val_loss {:#.5g} val_accuracy {:#.5g}".format(*loss_and_accuracy(net, val_set))
        for epoch, speed in enumerate((12.0, 24.0)):
            train_set.epoch.fill_(epoch)
            train = "loss {:#.5g} accuracy {:#.5g}".format(*loss_and_accuracy(net, train_set))
            expected += f"epoch {epoch} | 48/48 | {train}\n"
            expected += f"epoch {epoch} | {train} | {val} | {speed} samples/s\n"
        self.assertEqual(printed[-len(expected) :], expected)


# ---- The README: what it shows is run
def readme_programs():
    """Return ddp_reference.py and the README's programs, the sides of its diffs, by name."""
    texts = {"ddp_reference.py": SOURCE}
    diffs = re.findall(r"(?ms)^```diff (\S+) (\S+)\n(.*?)^```", README.read_text())
    for old_name, name, diff in diffs:
        for hunk in filter(None, re.split(r"(?m)^@@.*\n", diff)):
            old, new = ("".join(re.findall(rf"(?m)^[ {sign}](.*\n)", hunk)) for sign in "-+")
            # The first hunk that edits one.py shows it whole.
            text = texts.get(name) or texts.setdefault(old_name, old)
            texts[name] = edited(text, old, new)
    return texts


def printed_by(name, world_size, options="", *edits):
    """Return what rank 0 of a README program prints."""
    if name == "many.py" and world_size > GPUS:  # It needs a GPU for each rank.
        edits += "torch.cuda.is_available()", "False"
    return run_edited(world_size, options, *edits, text=readme_programs()[name])[0]


# (row, world sizes, old, new): many.py, so edited, ends with this row's numbers on so many ranks.
# Row 8 draws as __getitem__ would.
ROWS = (
    (1, (2,), " // world_size", ""),
    (2, (2,), "= cross_entropy(model(", "= cross_entropy(model.module("),
    (3, (2,), "    sampler.set_epoch(epoch)", "    pass"),
    (4, (2,), "range(rank, len(val_set), world_size)", "DistributedSampler(val_set)"),
    (5, (2,), "    dist.all_reduce(num_correct)", "    pass"),
    (6, (1, 2, 4), "in loader:", "in loader:\n        y[x[:, 0, 0] > 0, 4:] = -100"),
    (7, (1, 2, 4), "torch.nn.Conv1d(3, 3, 3, padding=1)", "ddp.ConvNet()"),
    (8, (1, 2, 4), "in loader:", "in loader:\n        x *= 4 * torch.rand(len(x), 1, 1)"),
    (10, (2,), "DistributedSampler(train_set)", "DistributedSampler(train_set, seed=rank)"),
)


class ReadmePrograms(TestCase):
    def test_the_sampler_reads_what_experiments_and_example_show(self):
        """It also warns where an order is read twice, as in experiment 2, and nowhere else."""
        rows = re.findall(r"(?m)^\| (\d\. .*?) \| (.*?) \| (.*?) \|", README.read_text())
        assert len(rows) == 9, rows
        for (setting, *shown), rank in product(rows, range(2)):
            dataset = range(int(setting.split()[1]))
            sampler = ddp.DistributedSampler(dataset, 2, rank)
            used = None if "no sampler" in setting else sampler
            loader = DataLoader(dataset, 4, sampler=used, drop_last="drop_last" in setting)
            epochs = []
            with mock.patch("warnings.warn") as warn:
                for epoch in range(2):
                    if "set_epoch" in setting:
                        sampler.set_epoch(epoch)
                    batches = ["".join(map(str, batch.tolist())) for batch in loader]
                    epochs.append(" ".join(batches) or "-")

            self.assertEqual(", ".join(epochs), shown[rank], f"{setting}, {rank=}")
            self.assertEqual(warn.called, not re.search("no sampler|set_epoch", setting), setting)

        loader = DataLoader(range(1000), 32, sampler=ddp.DistributedSampler(range(1000), 2, rank=1))
        sizes = [*map(len, loader)]
        text = f"each rank has {sum(sizes)} samples: {len(sizes)} batches, the last of {sizes[-1]}"
        self.assertIn(f"{text}, or {sizes.count(32)} with", README.read_text())

    def test_the_main_job_prints_what_the_readme_shows(self):
        ranks = max(n for n in (1, 2, 4, 8) if n <= (GPUS or 2))

        out, *_ = run_job(ranks, "--shares 8")

        job = f"world size {ranks}, global batch size 240 in 8 shares"
        self.assertIn(f"ddp on {'nccl' if GPUS else 'gloo'}, {job}, torch ", out)
        numbers = []
        for text in out, README.read_text():
            last_line = re.search(r"(?m)^epoch 5 \| loss .*", text)[0]
            numbers.append([number for _, number, _ in read_numbers(last_line)])
        assert_close(*numbers, "not the README's", 0.001 if GPUS else 0.0001)

    def test_programs_print_the_same_on_one_process_and_on_two(self):
        one = printed_by("one.py", 1)
        for name in ("many.py", "dp.py"):
            self.assertEqual(printed_by(name, 2), one, name)
        options = "--epochs 3 --lr 0.1 --shares 4"
        self.assertEqual(*(read_numbers(printed_by("my_job.py", n, options)) for n in (1, 2)))

    def test_the_rows_of_the_review_table_have_the_numbers_of_programs(self):
        for row, world_sizes, *edit in ROWS:
            numbers = [printed_by("many.py", ranks, "", *edit)[-7:-1] for ranks in world_sizes]
            shown = re.search(rf"(?m)^\| {row} \|.*", README.read_text())[0]
            self.assertIn(f" {', '.join(numbers)}", shown)

    def test_shards_train_as_their_samples_do_or_are_refused(self):
        path = Path("a.tar")
        with tarfile.open(path, "w") as tar:
            for index, sample in enumerate(ddp.SyntheticDataset(48, 64, seed=0)):
                for name, array in zip(("x.npy", "y.npy"), sample):
                    np.save(name, array)
                    tar.add(name, f"{index}.{name}")
        options = f"{SMALL} --shards a.tar --val-shards a.tar"
        texts = printed_by("shards.py", 2, options), run_job(2, SMALL)[0]
        self.assertEqual(*(re.findall(r" loss \S+ accuracy \S+", text) for text in texts))

        intact = path.read_bytes()
        cut_off = intact[: 15 * 5120]  # after 15 of 48 samples
        link = tarfile.TarInfo("48.x.npy")
        link.type = tarfile.SYMTYPE
        for content in cut_off, cut_off + b"?" * 2000, link.tobuf() + intact:
            path.write_bytes(content)
            with self.assertRaisesRegex(FAILED, "a.tar is damaged or lacks"):
                printed_by("shards.py", 1, options)


# ---- The processes
# Each slow program is ddp_reference.py with edits, started by the command that comes first.
PAUSE = """restarts, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if epochs_done > 1.3 and restarts == rank == "0":
        names = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_HOSTID"
        print("network", *map(os.environ.get, names), "workers by", mp.get_start_method())
        signal.pause()
    return 1"""
STUCK = """    if mp.current_process().name.endswith(":2"):  # The first was identify()'s.
        os.killpg(0, signal.SIGINT)  # as Ctrl-C does
        mp.parent_process().join()  # It is dead before this worker asks Linux for its own end.
    if sys.platform"""
SLOW_PROGRAMS = {
    "hanging.py": (
        f"{TORCHRUN} --nproc-per-node=2 --max-restarts=1 hanging.py "
        f"{SMALL} --timeout 15 --checkpoint hanging --checkpoint-every 1",
        *("return 1", PAUSE),
    ),
    # A loader worker is stuck, and the rank waits for it. Neither heeds Ctrl-C, as after &.
    "stuck.py": (
        f"stuck.py {SMALL} --shares 1 --nproc-per-node 1 --num-workers 1",
        *("    if sys.platform", STUCK, "signal.SIG_DFL", "signal.SIG_IGN"),
    ),
    "forgetful.py": (
        f"-m test_ddp_reference check forgetful.py {SMALL} --shares 2 --epochs 20 --lr 0.003",
        *('"--nproc-per-node"', '"--nproc" "-per-node"'),
        *("= resume(path, identity, parts)", '= resume(path, identity, {"net": net})'),
    ),
}


@cache
def start(name):
    """Start a slow program in a session of its own, as from a terminal, until the tests end."""
    command, *edits = SLOW_PROGRAMS[name]
    Path(name).write_text(edited(SOURCE, *edits))
    options = {"start_new_session": True, "preexec_fn": ddp.end_with_parent, "text": True}
    return Popen([sys.executable, *command.split()], stdout=PIPE, stderr=PIPE, **options)


def wait_for(name):
    """Return a slow program's (status, stdout, stderr) when its processes have ended."""
    out, err = start(name).communicate(timeout=300)
    return start(name).returncode, out, err


class TheProcesses(TestCase):
    def test_no_process_is_left_when_the_launcher_alone_ends(self):
        self.assertEqual(wait_for("stuck.py")[0], 130)  # They have ended when this returns.

    def test_a_hang_prints_all_stacks_and_torchrun_restarts(self):
        status, out, err = wait_for("hanging.py")

        times = re.findall(r"Timeout \((.*)\)!", err)  # Rank 0 waits longer.
        self.assertEqual((status, times), (0, ["0:00:16.500000", "0:00:18"]), err)
        self.assertEqual("ranks share GPUs" in err, GPUS == 1)
        self.assertRegex(err, " in lr_factor\n")
        self.assertRegex(err, " in (train_step|named_means|check_copies)\n")  # NCCL waits later.
        self.assertIn(f"network lo lo {0 if GPUS < 2 else None} workers by spawn\n", out)
        self.assertRegex(out, "resuming .* at epoch 1/2, sample 24")


# ---- bash run.sh check
# Which numbers are results, and which are not: those of colours, clocks and speeds, or with a unit.
NUMBER = r"(?i)(?<![\w.])[-+]?(?:(?:\d*\.\d+|\d+\.?(?=e))(?:e[-+]?\d+)?|inf|nan)(?!\w|\.\d)"
UNIT = r"(?:[mun]?s|secs?|seconds?|minutes?|h|hours?|[kKMGT]i?B|\w+/s(?:ec)?)(?:/\w+)?(?![\w/])"
CLOCK = r"(?<![\w@.])\d+:[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?![\d.])"
SPEED = r"\w+/[sS](?:ec)?[\"':= ]+[\d.]+"
NO_RESULT = rf"\x1b\[[\d;]*m|{CLOCK}|{SPEED}|(?<![\w.])[-+\d.e]+ ?{UNIT}"
OPTION = r"""["'](--[\w-]+)["']"""


def run_for_check(world_size, job, path, limit=1e6, kill_after=np.inf):
    """Return what a job prints until it ends, or is killed after so many lines.

    job: a script and its options. path: of its checkpoint. limit: seconds until it is ended.
    """
    launcher, variables, lines = [], {**os.environ}, []
    options = re.findall(OPTION, Path(job[0]).read_text())
    if "--nproc-per-node" not in options:
        launcher = [*TORCHRUN.split(), f"--nproc-per-node={world_size}"]
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # or lines come too late
        if GPUS == 1:  # Such a script wants a GPU for each process.
            variables["CUDA_VISIBLE_DEVICES"] = ""
    command = ["timeout", "--foreground", f"{limit}", sys.executable, *launcher, *job]
    # A later option counts, so the job's --checkpoint stays untouched.
    ours = {"--nproc-per-node": f"{world_size}", "--log-every": "1", "--checkpoint": path}
    for option, value in ours.items():
        if option in options:
            command += [option, value]
    end_with_check = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)  # as end_with_parent()
    process = Popen(command, text=True, stdout=PIPE, env=variables, preexec_fn=end_with_check)
    try:
        for line in process.stdout:
            lines.append(line.replace(path, ""))
            if len(lines) == kill_after:
                print("check: the job is killed", file=sys.stderr)
                return ""  # Below it is ended, and its ranks with it.
        if process.wait():
            what = f"took over {limit:.0f} s" if process.returncode == 124 else "failed (see above)"
            sys.exit(f"check: with {world_size} processes the job {what} after {lines[-1:]}")
    finally:
        process.terminate()
        process.communicate()  # until all its processes have ended
    return "".join(lines)


def read_numbers(printed, ignore="$^"):
    """Return (kind, number, text) of each decimal number that a job has printed.

    The text is the line up to the number ("epoch 0 | loss 0.5"), and the kind is that without
    numbers ("epoch  | loss #").
    """
    numbers = []
    for line in printed.splitlines():
        line = re.sub(ignore, "", re.sub(NO_RESULT, "", line[:1000]))
        for match in re.finditer(NUMBER, line):
            text = line[: match.end()]
            kind = re.sub(r"\d", "", re.sub(NUMBER, "#", text))
            numbers.append((kind, float(match[0]), text))
    return numbers


def compare(name, numbers, expected, tolerance):
    """Print how far a run is from one process: return differences (kind, expected kind, note)."""
    largest, apart, differing = Counter(), 0, []
    for kind, number, _ in expected:
        if np.isfinite(number):
            largest[kind] = max(abs(number), largest[kind])
    both = zip_longest(numbers, expected, fillvalue=("", np.nan, "nothing"))
    for (kind, number, text), (expected_kind, wanted, wanted_text) in both:
        difference = abs(number - wanted) / (largest[expected_kind] or 1)
        if f"{number}" == f"{wanted}":  # Both may be inf or nan.
            difference = 0
        if kind != expected_kind or np.isnan(difference):
            difference = np.inf
        apart = max(apart, difference)
        if difference > tolerance:
            differing.append((kind, expected_kind, f" (first {text!r}, not {wanted_text!r})"))
    print(f"{name}: {apart:.4f} apart{differing[0][2] if differing else ''}", flush=True)
    return differing


def find_cause(differing, expected):
    """Return how "The number of processes changes this job" goes on."""
    if any(kind != expected_kind for kind, expected_kind, _ in differing):
        return "by a line or decimal that one run lacks: does each rank print, or the batch grow?"
    # Neither validation nor a learning rate shows what training did.
    no_training = "(?i)(?<![a-z])((e?val|test)(?!ue)|lr[^#]*#$)"
    training = {kind for kind, *_ in expected if not re.search(no_training, kind)}
    if training and training.isdisjoint(kind for kind, *_ in differing):
        return "only in validation or lr: look at double samples, means, random numbers, BatchNorm."
    return """in training or in what it prints:
look at samples, their order, batch size, lr, random numbers, BatchNorm, .module(), means, sums
and, if late, rounding (try float64)."""


def check(arguments, folder, run=run_for_check):
    """Test whether a job is the same on any number of processes, and over a kill.

    SCRIPT.py is a copy of ddp_reference.py, or any script that torchrun starts. It runs on one
    process, then on 2 and 4 (with several GPUs on up to 16 of them), or on the numbers that divide
    its shares. If it has --checkpoint-every, it is also killed past its middle, and goes on with
    another number. All printed decimals are compared, but not those before a unit of time, size or
    speed, nor what --ignore matches. A difference is relative to the largest number of its kind.
    The status is 0 if none exceeds --tolerance. It misses integers, what hardly moves these
    numbers, what a short run never does, what is equally wrong on any number of processes, and what
    only another kill shows.
    """
    usage = "bash run.sh check [--tolerance 0.0005] [--ignore REGEX] [SCRIPT.py] [its options]"
    parser = ArgumentParser("check", usage=usage, description=check.__doc__)
    parser.add_argument("--tolerance", type=float, default=0.0005)
    parser.add_argument("--ignore", default="$^")
    parser.add_argument("job", nargs=REMAINDER)  # From the script on, options are the job's.
    args, options = parser.parse_known_args(arguments)  # Without a script, they may come first.
    job = options + args.job
    if not job or not job[0].endswith(".py"):
        job = [ddp.__file__, *job]
    try:
        saves = "--checkpoint-every" in re.findall(OPTION, Path(job[0]).read_text())
        re.compile(args.ignore)
    except (OSError, re.error) as error:
        parser.error(str(error))

    began = time.monotonic()
    one = run(1, job, f"{folder}/1")
    print(one, end="", flush=True)
    limit = 60 + 30 * (time.monotonic() - began)
    expected = read_numbers(one, args.ignore)
    if not any(np.isfinite(number) for _, number, _ in expected):
        return f"check: {job[0]} prints no decimal numbers on stdout (logging uses stderr)"
    most = GPUS if GPUS > 1 else 4  # Ranks of ddp_reference.py can share one GPU.
    found = re.search(r" in (\d+) shares", one)
    shares = int(found[1]) if found else 16
    counts = [n for n in range(1, most + 1) if shares % n == 0]
    if counts == [1]:
        return f"check: no number from 2 to {most} divides the shares: set --shares"

    differing = []
    for count in counts[1:]:
        numbers = read_numbers(run(count, job, f"{folder}/{count}", limit), args.ignore)
        differing += compare(f"{count} processes", numbers, expected, args.tolerance)
    if differing:
        again = read_numbers(run(1, job, f"{folder}/again", limit), args.ignore)
        if compare("one process again", again, expected, args.tolerance):
            return "The job differs from itself: seed it, --ignore times, or let it resume nothing."
        return f"The number of processes changes this job {find_cause(differing, expected)}"

    if not saves:
        print("No kill was tried: the job has no --checkpoint-every.")
    else:
        job += ["--checkpoint-every", "1"]
        run(counts[-1], job, f"{folder}/killed", limit, one.count("\n") // 2 + 2)
        numbers = read_numbers(run(counts[-2], job, f"{folder}/killed", limit), args.ignore)
        # Each run may first print its options.
        while numbers and numbers[0] in expected[:1]:
            numbers, expected = numbers[1:], expected[1:]
        if not 0 < len(numbers) < len(expected):
            return "check: the job did not go on after the kill: does it resume, is it too short?"
        name = f"over a kill ({counts[-1]} processes, then {counts[-2]} from {numbers[0][2]})"
        if compare(name, numbers, expected[-len(numbers) :], args.tolerance):
            return "The resumed job differs: state is lost, or Adam hid a factor (world size?)."
    print(f"All decimals are equal within the tolerance of {args.tolerance}.")


class TheCheck(TestCase):
    def test_check_finds_what_only_a_kill_shows(self):
        status, out, err = wait_for("forgetful.py")

        self.assertEqual(status, 1, err)
        self.assertIn("state is lost", err)
        self.assertRegex(out, r"\nover a kill \(2 processes, then 1 .* apart \(first 'epoch")

    def test_check_reads_results_of_any_format(self):
        line = "loss=0.5, Acc@1:98.25% val/score 1e-3 (nan) | -.5; inf. \x1b[1m0.25\x1b[0m min 0.75"
        others = "0.1 h 3.5ms 2.5 it/s 1.5 GB v2.13.0 7.5s/it 0.5 sec/it lr0.1 a/Sec: 2.5 0:00:01.5"
        numbers = [number for _, number, _ in read_numbers(f"{line} {others}")]
        np.testing.assert_array_equal(numbers, [0.5, 98.25, 1e-3, np.nan, -0.5, np.inf, 0.25, 0.75])

    @mock.patch("sys.stdout", io.StringIO())
    @mock.patch(f"{__name__}.GPUS", 1)
    def test_check_says_where_runs_differ(self):
        """Here runs are texts: of one process, two, and one again, or until and after a kill."""
        options = "Namespace(lr=0.1)\nbatch 2 in 2 shares\n"
        begin = f"{options}epoch 0 | 2/4 | value 0.5000, nan%\nepoch 0 | 4/4 | value 4e-1, inf%\n"
        end = "epoch 0 | val_loss=0.4 acc 0.5 took 9.0\nepoch 1 | 2/4 | value 0.3000, 1.00%\n"
        one = begin + end
        resumed = options + end.replace("9.0", "7.0")
        Path("job.py").write_text("'--checkpoint-every'")
        job = ["--ignore", "took .*", "job.py", "--tolerance", "1"]  # This tolerance is the job's.
        for two, later, message in (
            (one.replace("1.00%", "1.01%"), [one], "in training"),
            (one.replace("0.5000", "0.5003"), [one.replace("0.3000", "0.7")], "from itself"),
            (one.replace("0.3000", "0.3002"), ["", resumed], None),  # just within
            (one.replace("0.3000", "nan"), [one], "in training"),
            (one.replace("acc 0.5", "acc 0.6"), [one], "only in validation"),
            (one + end, [one], "by a line or decimal"),
            (one.replace("value 4e-1", "bias 4e-1"), [one], "by a line or decimal"),
            (one, ["", ""], "did not go on"),
            (one, ["", one], "did not go on"),
        ):
            runs = mock.Mock(side_effect=(one, two, *later))
            self.assertIn(str(message), str(check(job, "", runs)), (two, later))
        self.assertIn(" 0.2000 apart", sys.stdout.getvalue())
        resumed_by = 1, [*job[2:], "--checkpoint-every", "1"], "/killed"
        self.assertEqual(runs.call_args[0][:3], resumed_by)

        # Without --checkpoint-every no kill is tried.
        options = "'--nproc-per-node' '--checkpoint'"
        Path("job.py").write_text(f"import sys; print(*sys.argv); exit(1)  # {options}")
        self.assertIn("no decimal", check(["--amp"], "", lambda *_: "1/2 inf"))
        self.assertIsNone(check(job, "", mock.Mock(side_effect=(one, one))))
        text = "lr 0.1 val 0.5"
        runs = mock.Mock(side_effect=(text, text, "lr 0.1 val 0.6", text))  # Only 4 differ.
        self.assertIn("in training", check(job, "", runs))
        with self.assertRaisesRegex(SystemExit, r"failed .*a --nproc-per-node 7 --checkpoint \\n"):
            run_for_check(7, ["job.py", "a"], "a.ck")
        Path("job.py").write_text("import time; time.sleep(99)")
        with self.assertRaisesRegex(SystemExit, "took over 1 s"):
            run_for_check(1, ["job.py"], "ck", limit=1)


def main():
    """Do `check` or `programs`, or run the tests."""
    if sys.argv[1:] == ["programs"]:
        for name, text in readme_programs().items():
            if not os.path.exists(name):
                Path(name).write_text(text)
                print(f"wrote {name}")
        return
    if sys.argv[1:2] == ["check"]:
        for number in (signal.SIGINT, signal.SIGTERM):  # so that no file is left
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TMPDIR"] = folder
            sys.exit(check(sys.argv[2:], folder))
    result = unittest.main(exit=False, verbosity=2).result
    failed = len({f"{test}".split()[0] for test, _ in result.failures + result.errors})
    skipped = len(result.skipped)
    passed = max(0, result.testsRun - failed - skipped)  # setUpModule() may have failed.
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed > 0 or not result.testsRun)  # -k may name no test.


if __name__ == "__main__":
    main()
