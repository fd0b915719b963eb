"""The guarantees of ddp_reference.py, and the command that tries them on your own job.

    bash run.sh test                 # all tests
    bash run.sh test -k Lesson       # only the lessons
    bash run.sh check my_job.py      # is this job the same on any number of processes?

First come six lessons. Each compares what ranks do with something simpler, such as one process with
the whole batch. First read the docstring of ddp_reference.py, which explains the words, and before
each lesson what its title names in brackets.

"To break it" names a line of ddp_reference.py (in Lesson 0, of this file). Cover what follows
"Then", and predict it. Change the line, run the lesson (`bash run.sh test -k Lesson2`) or what the
question names, read the end of the failure (of one rank), and undo the change. Lessons 1, 2, 3 and
5 try one rank first, which passes. With most faults `bash run.sh` gives no error.

The tests need chapter 1 of ddp_reference.py as it is.
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
import threading
import time
import unittest
from argparse import ArgumentParser
from collections import Counter, OrderedDict
from functools import cache, partial
from itertools import product
from pathlib import Path
from subprocess import PIPE, Popen
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
    "PYTHONWARNINGS": "ignore:ranks share GPUs",  # Here they may.
}
GPUS = torch.cuda.device_count()


def setUpModule():
    """Work in an empty folder, and start the slow programs, which run beside the tests."""
    if not __debug__:
        raise RuntimeError("PYTHONOPTIMIZE or -O turns assertions off")
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    unittest.addModuleCleanup(os.chdir, HERE)
    os.chdir(folder.name)
    os.environ["TMPDIR"] = folder.name  # Programs that are killed leave files there.
    logging.disable()  # PyTorch would log each rank that it ends.
    if not any(x.startswith("-k") for x in sys.argv):  # With -k, a test starts what it needs.
        slow_programs()


# ---- Lesson 0: the machine
# Can this machine add? In training a wrong sum passes for noise, but sums of integers are exact, so
# a single wrong one shows. There is a rank for each GPU, but at least two. Rank r makes the list r,
# r + 1, r + 2 and so on. With W ranks the sum at index i must be W * i + (0 + 1 + ... + W - 1).
# (run_job(), below Lesson 5, starts ranks that call add_up_integers() in place of train(). An error
# on any rank fails the test.)
#
# To break it, leave out `dist.all_reduce(total)` below, in this file. How many sums are wrong?
# Then each rank keeps its list, on two ranks i + r, not 2 * i + 1: on rank 0 all are wrong, on rank
# 1 all but the first.
#
# Or put `if rank == 0: dist.all_reduce(0 * total)` above it. Which rank fails?
# Then rank 1 fails: its call pairs with that of the zeros. Rank 0 waits for a partner.
def add_up_integers(args, device):
    """On a rank: all-reduce integers, and compare each with the sum that it must be."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for megabytes in (1, 64, 64):  # The first uses of NCCL are slow, so the last time is printed.
        # 2**18 integers of 4 bytes are a megabyte.
        integers = torch.arange(megabytes * 2**18, dtype=torch.int32, device=device)
        total = integers + rank
        expected = world_size * integers + sum(range(world_size))
        began = time.perf_counter()
        dist.all_reduce(total)
        wrong = (total != expected).sum().item()
        seconds = time.perf_counter() - began  # On a GPU only .item() waits for the sum.
        assert not wrong, f"{wrong} of {len(total)} integers are wrong on rank {rank}, {device}"
    print(f"rank {rank} of {world_size} added up 64 MB, at least {64 / seconds:.0f} MB/s, {device}")


class Lesson0Machine(TestCase):
    def test_all_ranks_add_up_integers_exactly(self):
        ranks = max(GPUS, 2)  # main() wants a global batch that they divide.
        printed = run_job(ranks, f"--global-batch-size {ranks}", train=add_up_integers)
        print(*printed, sep="")
        assert all("added up 64 MB" in text for text in printed)


# ---- Lesson 1: which samples a rank reads (DistributedSampler)
# A sampler is told its rank, so here one process plays all ranks. On 1 to 4 ranks a step must have
# the 12 samples that PyTorch's sampler gives to a single rank. (In a job, shares stand for ranks.)
#
# To break it, leave out `+ self.rank` in DistributedSampler. What do two ranks read?
# Then both read the samples of rank 0: half of the samples, each twice.
#
# Or put `+ self.rank` after `self.seed + self.epoch` there. Is each sample read once?
# Then each rank has an order of its own, so some samples are read twice, and others never.
class Lesson1Sampler(TestCase):
    def test_a_step_has_the_same_samples_on_any_number_of_ranks(self):
        dataset = range(24)
        torch_sampler = TorchSampler(dataset, num_replicas=1, rank=0)
        torch_sampler.set_epoch(3)
        order = list(torch_sampler)
        for world_size, steps_done in product(range(1, 5), (0, 1)):
            # An epoch has two steps. After a stop only the second one is left.
            expected = [sorted(order[:12]), sorted(order[12:])][steps_done:]
            loaders = []
            for rank in range(world_size):
                sampler = ddp.DistributedSampler(dataset, world_size, rank)
                sampler.set_epoch(3, samples_read=12 * steps_done)
                loaders.append(DataLoader(dataset, 12 // world_size, sampler=sampler))

            # zip() takes a batch of each rank. Together they are a step, in any order.
            read = [sorted(torch.cat(batches).tolist()) for batches in zip(*loaders)]
            assert read == expected, f"{world_size=}, {steps_done=}: {read}, not {expected}"
            assert len(loaders[0]) == len(read)  # A loader must know how many steps are left.


# ---- What Lessons 2 to 5 share: a comparison, data, nets, and a step in plain PyTorch
def assert_close(actual, expected, what, tolerance=2e-5):
    """Assert that numbers or tensors are equal, by default up to the rounding of float32."""
    options = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(actual, expected, **options, msg=lambda text: f"{text}\n{what}")


class Ragged(ddp.SyntheticDataset):
    """Signals of length 40. In turn the first 0, 10, 20, 30 or 40 labels are -100: ignored."""

    def __init__(self, num_samples):
        super().__init__(num_samples, length=40, seed=0)
        for index, y in enumerate(self.tensors[1]):
            y[: index % 5 * 10] = -100


def plain_net():
    """Return a net without BatchNorm, the same in every process. One parameter is frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 1))
    net[0].bias.requires_grad_(False)
    return net


def net_with_batch_norm():
    return nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(inplace=True), plain_net(), nn.BatchNorm1d(3))


def plain_step(net, optimizer, shares, seed, clip_grad_norm=0):
    """Do what train_step() does in plain PyTorch, in one process with all shares."""
    num_labels = sum((y != -100).sum() for _, y in shares)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    for number in reversed(range(len(shares))):  # Share 0 is last, so its buffers remain.
        net.load_state_dict(buffers, strict=False)
        ddp.seed_generators(*seed, number)
        x, y = shares[number]
        (F.cross_entropy(net(x), y, reduction="sum") / num_labels).backward()
    if clip_grad_norm:
        nn.utils.clip_grad_norm_(net.parameters(), clip_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


# ---- Lesson 2: a step (train_step)
# A step must move the net as one process with the whole batch would, even if the ranks have
# different numbers of labels. Let rank 0 have one label, with loss 7, and rank 1 three labels, with
# loss 3 each. The mean is 16 / 4 = 4, but the mean of the two ranks' means is (7 + 3) / 2 = 5. So
# an all-reduce counts the 4 labels first. Then rank 0 computes the gradient of 2 * 7 / 4 = 3.5, and
# rank 1 that of 2 * 9 / 4 = 4.5. DDP averages these: (3.5 + 4.5) / 2 = 4. (The factor 2 is the
# world size.)
#
# To break it as most loops do, replace `sums[1] * scale` by `sums[1] / sums[0]`. Two ranks have
# 140 and 130 labels. What weight does the loss of a label get?
# Then DDP halves 1/140 and 1/130: 1/280 or 1/260, not 1/270. So 0.weight ends up to 0.0007 off.
#
# Or let train_step() call `forward(model.module, shares[index], amp)`. Does `bash run.sh` fail?
# Then DDP.forward(), which prepares averaging, is skipped: check_copies() fails after epoch 0.
def compare_steps(make_net, num_shares, at_once, args, device):
    """On a rank: take two steps with its shares of a batch, and compare with one process.

    at_once: whether that computes the batch as a whole, or share by share.
    """
    x, y = (tensor.to(device) for tensor in Ragged(12).tensors)
    x = x.double()  # In float64 hardly anything is rounding.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_shares = num_shares or world_size
    shares = [(x[number::num_shares], y[number::num_shares]) for number in range(num_shares)]
    nets = [make_net().double().to(device) for _ in range(2)]
    # With Adam a step hardly depends on a factor, so a wrong one would not show.
    optimizers = [torch.optim.SGD(net.parameters(), lr=1) for net in nets]
    model = ddp.DistributedDataParallel(nets[0])
    model.broadcast_buffers = False  # as in train()
    for step in range(2):
        ddp.train_step(model, optimizers[0], shares[rank::world_size], (step,))
        plain_step(nets[1], optimizers[1], [(x, y)] if at_once else shares, (step,))

    ddp.sync_buffers(nets[0])
    for name, expected in nets[1].state_dict().items():
        what = f"{name} of rank {rank} of {world_size} ({num_shares=})"
        assert_close(nets[0].state_dict()[name], expected, what, 1e-12)
    print("equal")


class Lesson2Step(TestCase):
    def test_a_step_is_that_of_one_process_with_the_whole_batch(self):
        # With a share for each of the 12 samples, two shares have no label.
        for num_shares, world_size in product((None, 12), range(1, 5)):
            compare = partial(compare_steps, plain_net, num_shares, True)
            assert all("equal" in text for text in run_job(world_size, train=compare))


# ---- Lesson 3: evaluation (evaluate)
# Loss and accuracy must be those of one process with all samples, even if 25 samples are shared
# unequally, or if 4 ranks share 2, and some have none. So each rank adds up its own losses and
# labels, and one all-reduce after the loop adds up all ranks' sums. A collective in the loop could
# hang: of 25 samples in batches of 4, rank 0 of 2 has four batches, rank 1 three.
#
# All ranks must evaluate the net of rank 0, which is saved. BatchNorm evaluates with running means
# and variances, and each rank has its own (Lesson 4).
#
# To break it, leave out `dist.all_reduce(total)` in evaluate(). Do the ranks agree?
# Then the loss is 1.096 on rank 0 and 1.113 on rank 1, not 1.104. Both look right, and a job prints
# only that of rank 0.
#
# Or leave out `sync_buffers(net)` there. Do the ranks agree?
# Then they do, but on a wrong loss, 1.100: a sum of losses that used different running means.
def loss_and_accuracy(net, dataset):
    """Return the mean loss and the accuracy over all labels of a dataset, in plain PyTorch."""
    x, y = default_collate([*dataset])
    logits = net.eval()(x)
    accuracy = (logits.argmax(1) == y).sum() / (y != -100).sum()
    return [F.cross_entropy(logits, y).item(), accuracy.item()]


def compare_evaluation(num_samples, args, device):
    """On a rank: evaluate its share of the samples, and compare with one process."""
    expected = loss_and_accuracy(net_with_batch_norm(), Ragged(num_samples))

    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = net_with_batch_norm().to(device)
    # Each running mean is the rank. They are not contiguous, either.
    net[0].running_mean = torch.full((3, 2), float(rank), device=device)[:, 0]
    indices = range(rank, num_samples, world_size)
    sums = ddp.evaluate(net, DataLoader(Ragged(num_samples), 4, sampler=indices))

    assert sums[0] > 0 and sums.dtype == torch.float64
    means = (sums[1:] / sums[0]).tolist()
    assert_close(means, expected, f"Loss and accuracy of rank {rank} of {world_size}")
    print("equal")


class Lesson3Evaluation(TestCase):
    def test_loss_and_accuracy_are_those_of_one_process(self):
        for world_size, num_samples in product(range(1, 5), (25, 2)):
            compare = partial(compare_evaluation, num_samples)
            assert all("equal" in text for text in run_job(world_size, train=compare))


# ---- Lesson 4: shares (train_step, seed_generators)
# Many nets look at several samples at once, or draw random numbers. BatchNorm makes -1 and 1 of the
# values 1 and 5, but -1.4 and 1.4 if it sees them with 3 and 3. So what a net learns depends on who
# computes what, unless that is fixed. Therefore a step has S shares. Share s has the samples, and
# the random numbers, of rank s in a job with S ranks. It begins with the buffers that the step
# before has left on rank 0, such as running means. So 4 ranks may compute a share each, 2 ranks
# shares 0 and 2, and 1 and 3, or 1 rank all.
#
# To break it, replace `index * world_size` by `0` where train_step() seeds. Do 4 ranks fail? (They
# are tried first.) Then no, but 2 do: both shares of a rank drop the same logits.
#
# Or replace `sync_buffers(model.module, buffers)` there by `None`. Do 4 ranks fail?
# Then yes: each keeps a running mean of its own.
class RunningMean(nn.Module):
    """Subtract a mean of the batches before. The forward pass reads a buffer, and replaces it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 1))

    def forward(self, x):
        output = x - self.mean
        if self.training:
            self.mean = (self.mean + x.mean((0, 2))[:, None]) / 2
        return output


def net_for_shares():
    return nn.Sequential(RunningMean(), nn.Tanh(), net_with_batch_norm(), nn.Dropout(0.1))


class Lesson4Shares(TestCase):
    def test_a_step_in_shares_is_that_of_a_plain_loop_over_them(self):
        for world_size in (4, 2, 1):
            compare = partial(compare_steps, net_for_shares, 4, False)
            assert all("equal" in text for text in run_job(world_size, train=compare))


# ---- Lesson 5: the number of ranks, and stops (chapter 4)
# plain_loop(), below, is plain PyTorch in one process, and never resumes. A job with augmentation,
# BatchNorm, dropout, a warm-up, clipping, uneven labels and two learning rates must end with the
# loop's net on any number of ranks, even if killed and resumed on another number. It does, because
# - a step's samples (Lesson 1), gradient (2) and shares (4) are those of one process,
# - the random numbers of an item follow from the seed, the epoch and the index,
# - the learning rate follows from the epoch and the count of samples read, not from a run's steps,
# - the checkpoint holds this epoch and count, the net, and the optimizer with its momentum.
#
# To break it, let make_loaders() set `share_size = args.global_batch_size`. How many of the five
# steps of an epoch does `bash run.sh --log-every 1` print?
# Then none, and nan: one of 8 shares has 150 of the 1200 samples, which is less than a batch.
#
# Or let train() call `resume(path, identity, {"net": net})`. Which jobs end with a different net?
# Then those that were stopped, because they lose the optimizer's momentum.
OPTIONS = "--epochs 2 --global-batch-size 12 --lr 0.1 --clip-grad-norm 0.3 --seed 5"
NUM_SAMPLES = 47  # Three batches of 12 an epoch, and 11 left out.


class Augmented(Ragged):
    """Signals of Ragged, scaled by random numbers from PyTorch, NumPy and Python."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (torch.rand(()) + np.random.rand() + random.random()), y


def make_augmented_task(args, device):
    net = net_for_shares().to(device)
    groups = []
    for number, parameter in enumerate(net.parameters()):
        groups.append({"params": [parameter], "lr": args.lr * (1 + number % 2)})
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
    return Augmented(NUM_SAMPLES), Ragged(10), net, optimizer


def plain_loop(args, device):
    """In place of train(): do the same in plain PyTorch, with equal random numbers."""
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = make_augmented_task(args, device)
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    sampler = TorchSampler(train_set, seed=args.seed)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        batches = BatchSampler(sampler, args.global_batch_size, drop_last=True)
        for step, indices in enumerate(batches):
            samples = []
            for index in indices:
                ddp.seed_generators(args.seed, epoch, index)
                samples.append([tensor.to(device) for tensor in train_set[index]])
            samples_read = step * args.global_batch_size
            for group, lr in zip(optimizer.param_groups, base_lrs):
                group["lr"] = lr * min(1, epoch + samples_read / NUM_SAMPLES + 0.1)
            shares = [default_collate(samples[s :: args.shares]) for s in range(args.shares)]
            place = args.seed, epoch, samples_read
            plain_step(net, optimizer, shares, place, args.clip_grad_norm)
    torch.save({"net": net.state_dict()}, args.checkpoint)


def stop_at(stop_after, args, epochs_done):
    """In place of lr_factor(): warm up, and let rank 0 be killed after so many epochs."""
    if epochs_done >= stop_after and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.float64(min(1, epochs_done + 0.1))  # A NumPy number must work, too.


def net_after(options, runs, **replacements):
    """Do runs (ranks, stop_after), each resuming the one before: return the last net."""
    path = f"{tempfile.mkdtemp(dir='.')}/ck"
    options = f"{options} --checkpoint {path} --checkpoint-every 1"
    for number, (ranks, stop_after) in enumerate(runs):
        replacements["lr_factor"] = partial(stop_at, stop_after)
        with expect_kill() if stop_after < np.inf else contextlib.nullcontext():
            run_job(ranks, options, **replacements)
        assert ("resuming" in Path("rank0").read_text()) == (number > 0), runs
    return torch.load(path, map_location="cpu")["net"]


class Lesson5NumberOfRanks(TestCase):
    def test_a_job_ends_as_a_plain_loop_does(self):
        # Steps begin at 0, 12/47 and 24/47 of an epoch, so it is killed before steps 3 and 5 of 6.
        stopped = [(4, 0.5), (3, 1.2), (2, np.inf)]
        for option, runs in ("--num-workers 1", [(1, np.inf)]), ("--shares 12", stopped):
            options = f"{OPTIONS} {option}"
            expected = net_after(options, [(1, np.inf)], train=plain_loop)
            net = net_after(options, runs, make_task=make_augmented_task)
            assert_close(net, expected, f"(ranks, epochs until a kill): {runs}, {options}")


# ---- The other guarantees: what is refused, printed and saved
# If a new option changes the net, it goes into OPTIONS and plain_loop() (Lesson 5). If it changes
# printed numbers, it goes into loss_and_accuracy() and the test of these numbers. Otherwise it gets
# a test of its own. Forget it in one call after the other: a test must fail.
def be_rank(rank, world_size, port, options, replacements):
    """Be one rank of a job: run main() as if torchrun had started this process."""
    mp.set_start_method(None, force=True)  # The forkserver has set it, but torchrun would not.
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{world_size}",
        "LOCAL_RANK": f"{world_size - 1 - rank}",  # Reversed, so that mistaking it for RANK fails.
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": f"{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # run_job() has made the store.
    }
    vars(ddp).update(replacements)
    sys.argv = ["ddp_reference.py", *f"--timeout 60 --shares {world_size} {options}".split()]
    with open(f"rank{rank}", "w") as out, contextlib.redirect_stdout(out):
        ddp.main()
    assert not dist.is_initialized()


def run_job(world_size, options="", **replacements):
    """Run a job on so many ranks, by default with a share for each: return what each rank printed.

    replacements: functions by name, in place of those of ddp_reference.py. They are pickled, so
    they must be at the top level. Raises mp.ProcessRaisedException if a rank raises.
    """
    # The ranks are forked from a process that has done the slow imports.
    mp.set_forkserver_preload(["ddp_reference", "torch._dynamo"])
    # The port is opened here, because a store that opens its own listens on all networks.
    server = socket.create_server(("localhost", 0))
    store = dist.TCPStore(*server.getsockname(), is_master=True, master_listen_fd=server.detach())
    arguments = world_size, store.port, options, replacements
    mp.start_processes(be_rank, arguments, world_size, start_method="forkserver")
    return [Path(f"rank{rank}").read_text() for rank in range(world_size)]


def expect_kill():
    """Return a context manager for a job whose rank 0 is killed. Others may raise first."""
    return TestCase().assertRaises((mp.ProcessExitedException, mp.ProcessRaisedException))


def edited(text, *edits):
    """Return a program in which texts are replaced. edits: old, new, old, new and so on."""
    for old, new in zip(edits[::2], edits[1::2]):
        assert text.count(old) == 1, f"not once in the program: {old}"
        text = text.replace(old, new)
    return text


def be_program():
    """In place of main(): run program.py. If ranks lack GPUs that it needs, it sees none."""
    needs_gpus = "os.environ['LOCAL_RANK']" in Path("program.py").read_text()
    if needs_gpus and int(os.environ["WORLD_SIZE"]) > GPUS:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    runpy.run_path("program.py", run_name="__main__")


def run_edited(world_size, options, *edits, text=SOURCE):
    """Run a program, with edits, on so many ranks: return what each rank printed."""
    Path("program.py").write_text(edited(text, *edits))
    return run_job(world_size, options, main=be_program)


# A small job with four steps an epoch. If an option is given twice, the later one counts.
SMALL = "--num-samples 48 --length 64 --epochs 2 --global-batch-size 12 --shares 12"

ADAM = "Adam(net.parameters()"
NET = "net = ConvNet().to(device)"
BATCHES = "watched(zip(*train_loaders), args.timeout)"
WRAP = "model = DistributedDataParallel(net)"
EXTRA = "dist.get_rank() and net.register_buffer('extra', torch.ones(1))"
# (options, pattern, old, new): two ranks that resume ck with these options and edits must fail with
# this pattern, leave ck as it was, and make no file `new`.
NEW = "--checkpoint new"
FAULTS = (
    ("--seed 9 --num-samples 60 --global-batch-size 24 --shares 6", "seed=0.*=12.*=12.*=48.*data="),
    ("--num-samples 6", "larger than the training set"),
    ("--lr inf", "holds a nan, so nothing was written to .*ck"),
    ("--checkpoint code", "Weights only load failed"),
    ("--checkpoint flipped", "cannot resume from .*flipped: .*a checksum is wrong"),
    ("", "with optimizer Adam, parameters=", ADAM, "SGD(reversed([*net.parameters()])"),
    ("", "that the net lacks", ADAM, "Adam([nn.Parameter(torch.ones(()))]"),
    ("", "of a job with SUMS=.*accuracy", '"accuracy")', '"top1")'),
    ("", "an item differs", "dataset[index]", "dataset[index][0].mul_(2),"),
    (NEW, r"to .*new: (.|\n)*numpy", ADAM, f"{ADAM}, eps=np.float64(1)"),
    ("", r"or lack .*\(0, 0\).*\(2, 0\)", "= resume(path", "= resume(path + 'x' * rank"),
    (NEW, "data.*'data=.*'data=", "length, args.seed)", "length, dist.get_rank())"),
    (NEW, "data.*'data=.*'data=", "dataset[index]", "dataset[index][0], dist.get_rank()"),
    (NEW, "or net.*'extra'", NET, f"{NET}; {EXTRA}"),
    ("", "ranks' 0.weight differ", WRAP, f"{WRAP}; net[0].weight.data += rank"),
    ("", r"needs DistributedDataParallel\(net\)", WRAP, "model = net"),
    ("", "shares must be batches", BATCHES, "[[{'x': 0}]]"),
    ("", "shares must be batches", BATCHES, "[(torch.ones(2), torch.ones(2))]"),
    ("", r"No space left(.|\n)*nothing was written to .*ck", "open(temporary", "open('/dev/full'"),
)


def make_timed_task(args, device):
    """Return a task with uneven labels, random items in validation, and a net without BatchNorm."""
    time.perf_counter = iter(range(0, 99, 2)).__next__  # Each look at the clock takes two seconds.
    net = plain_net().to(device)
    return Ragged(48), Augmented(25), net, torch.optim.Adam(net.parameters(), lr=args.lr)


def stock_ddp(args, device):
    """In place of train(): do what PyTorch's tutorials do, with a mean loss."""
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = ddp.make_task(args, device)
    model = ddp.DistributedDataParallel(net)
    sampler = TorchSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.global_batch_size // dist.get_world_size(), sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):  # The random numbers are those of shares.
            ddp.seed_generators(args.seed, epoch, step * args.global_batch_size, dist.get_rank())
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict()}, args.checkpoint)


class OtherGuarantees(TestCase):
    def test_the_sampler_reads_what_pytorchs_does(self):
        """Our permutation of int32 is PyTorch's of int64, also where 16 bits could not count."""
        for num_samples, num_replicas, shuffle, drop_last in product(
            (*range(20), 70000), range(1, 7), (True, False), (True, False)
        ):
            for rank in range(num_replicas):
                arguments = range(num_samples), num_replicas, rank, shuffle, 7, drop_last
                ours, theirs = ddp.DistributedSampler(*arguments), TorchSampler(*arguments)

                # Compare texts, because np.int32(3) equals 3. Ours must be ints.
                assert f"{list(ours)}" == f"{list(theirs)}", arguments
                assert vars(theirs).items() <= vars(ours).items(), arguments

        for rank, samples_read in ((2, 0), (-1, 0), (1, 3)):
            with self.assertRaises(ValueError):
                ddp.DistributedSampler(range(8), 2, rank).set_epoch(0, samples_read)

    def test_what_cannot_work_is_refused_in_one_line(self):
        for options, variables, pattern in (
            ("--nproc-per-node 7", {}, "try --shares 7 --global-batch-size 245"),
            ("--shares 9 --nproc-per-node 3", {}, "try --shares 3 --global-batch-size 240"),
            ("--checkpoint-every 1 --nproc-per-node 1", {}, "every needs --checkpoint"),
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
        run_edited(2, f"{SMALL} --checkpoint ck")
        intact = Path("ck").read_bytes()
        flipped = bytearray(intact)
        flipped[len(flipped) // 2] ^= 1  # The middle lies in a tensor.
        Path("flipped").write_bytes(flipped)
        torch.save(os.system, "code")  # To load this is to import code.

        for options, pattern, *edits in FAULTS:
            with self.assertRaisesRegex(mp.ProcessRaisedException, pattern, msg=pattern):
                run_edited(2, f"{SMALL} --epochs 3 --checkpoint ck {options}", *edits)
            assert Path("ck").read_bytes() == intact and not os.path.exists("new"), pattern

    def test_a_step_calls_four_collectives_and_never_item(self):
        """They are of the count of labels, the buffers, the gradients and the sums. Also, the
        watchdog is restarted at each step and at each batch of validation, and stopped at the end.
        """
        profiled = """    with torch.profiler.profile() as profile:
        train(args, device)
    print([event.name for event in profile.events()])"""
        edits = (
            *("    train(args, device)", profiled),
            # Reading a sample calls .item(), and so does Adam on a CPU.
            *(ADAM, "SGD(net.parameters()", "SyntheticDataset(25", "SyntheticDataset(42"),
            *("faulthandler.dump_traceback_later(", "(lambda *_, exit: print('restarted'))("),
            *("faulthandler.cancel_dump_traceback_later()", "print('stopped')"),
        )
        # Both jobs read 84 samples, in 14 steps of 6 and 6 of 14, and have 28 and 12 batches of
        # validation. So they differ by what 8 steps, each of two shares, and 16 such batches call.
        options = f"{SMALL} --num-samples 42 --shares 2 --clip-grad-norm 1"
        (of_14_steps,) = run_edited(1, f"{options} --global-batch-size 6", *edits)
        (of_6_steps,) = run_edited(1, f"{options} --global-batch-size 14", *edits)

        for text, expected in ("c10d::", 4 * 8), ("aten::item", 0), ("restarted", 8 + 16):
            self.assertEqual(of_14_steps.count(text) - of_6_steps.count(text), expected, text)
        assert of_6_steps.endswith("\nstopped\n")

    def test_with_a_share_for_each_rank_it_is_stock_ddp_bit_for_bit(self):
        options = "--epochs 2 --num-samples 48 --length 64 --global-batch-size 12 --shares 2"
        run_job(2, f"{options} --checkpoint stock", train=stock_ddp)
        expected = torch.load("stock", map_location="cpu")["net"]
        for ranks, tolerance in ((2, 0), (1, 2e-6)):
            run_job(ranks, f"{options} --checkpoint of{ranks}")
            net = torch.load(f"of{ranks}", map_location="cpu")["net"]
            assert_close(net, expected, f"on {ranks} ranks", tolerance)

    def test_all_places_and_generators_draw_their_own_numbers(self):
        drawn = set()
        for place in product(range(3), repeat=3):
            ddp.seed_generators(*place)
            drawn |= {random.random(), np.random.randint(2**16), torch.randint(2**16, ()).item()}
        self.assertEqual(len(drawn), 3 * 27)

    def test_the_loss_of_a_net_in_bfloat16_is_summed_in_float32(self):
        output, y = torch.randn(64, 3, 99).bfloat16(), torch.zeros(64, 99, dtype=torch.int64)
        expected = F.cross_entropy(output.double(), y, reduction="sum")
        assert_close(ddp.batch_sums(output, y)[1], expected, "the loss")

    def test_unusual_jobs_are_not_refused(self):
        """Their items are joined by the user's function, and no batch has a label. Copies differ by
        rounding, a mask is infinite, a text is state of the net, and a buffer that is not saved
        grows on one rank only. With --amp logits are bfloat16.
        """
        collate = "lambda items: [torch.stack(x) for x in list(zip(*items))[2:]]"
        step = """output = model(*inputs)
        assert output.dtype == torch.bfloat16
        return batch_sums(output, 0 * y - 100)"""
        net = f"""{NET}
    ConvNet.get_extra_state = ConvNet.set_extra_state = lambda *_: "text"
    net.register_buffer("mask", torch.full((3,), -torch.inf, device=device))
    net.register_buffer("cache", torch.ones(1, device=device), persistent=False)"""
        grow = """            net.cache = net.cache.repeat(2 - rank)[:999]
            net[0].weight.data *= 1 + rank * 2**-23\n"""
        edits = (
            *("return self.dataset[index]", "return 'text', None, *self.dataset[index]"),
            *('"pin_memory"', f'"collate_fn": {collate}, "pin_memory"'),
            *("            samples_read +=", f"{grow}            samples_read +="),
            *("return batch_sums(model(*inputs), y)", step),
            *(NET, net),
        )
        options = f"{SMALL} --shares 2 --epochs 20 --amp --checkpoint unusual"
        self.assertIn("\nepoch 19 | loss nan", run_edited(2, options, *edits)[0])

    def test_two_jobs_with_one_checkpoint_do_not_mix(self):
        class Meanwhile:
            def __reduce__(self):  # This is called when the file is half written.
                save({"net": nn.Linear(300, 300)})
                return OrderedDict, ()

        save = partial(ddp.save_checkpoint, "both", [], progress=0)
        state = {"weight": torch.ones(10**5), "then": Meanwhile()}
        save({"net": mock.Mock(state_dict=lambda: state)})
        assert torch.load("both")["net"]["weight"].shape == (10**5,)

    def test_all_printed_numbers_are_those_of_the_job(self):
        # With a learning rate of 0 the net stays what it is.
        means = "loss {:#.5g} accuracy {:#.5g}".format(*loss_and_accuracy(plain_net(), Ragged(48)))
        val_set = ddp.SeededItems(Augmented(25), seed=1)
        assert val_set.epoch.is_shared(), "forked loader workers would not see the epoch"
        all_means = means + " | val_loss {:#.5g} val_accuracy {:#.5g}".format(
            *loss_and_accuracy(plain_net(), val_set)
        )
        os.symlink("target", "link")  # A link stays a link.
        options = f"{SMALL} --lr 0 --log-every 4 --checkpoint link --checkpoint-every 2"
        run_three = partial(run_job, 3, make_task=make_timed_task)
        # The first run saves --lr 1, which must not come back, and ends before its first step.
        for more, stop_after in (("--lr 1", 0), ("", 0.7)):
            with expect_kill():
                run_three(f"{options} {more}", lr_factor=partial(stop_at, stop_after))
            assert os.path.exists("target")

        printed = "".join(run_three(options))  # Only rank 0 may print.

        # An epoch takes two seconds. After the stop 24 samples are left of the first one.
        expected = f"""
resuming {os.path.realpath("target")} at epoch 0/2, sample 24
epoch 0 | 48/48 | {means}
epoch 0 | {all_means} | 12.0 samples/s
epoch 1 | 48/48 | {means}
epoch 1 | {all_means} | 24.0 samples/s
"""
        assert printed.endswith(expected), f"{printed}\nshould end with{expected}"
        assert os.path.islink("link")


# ---- The README: what it shows is run
def diff_side(diff, sign):
    """Return the old side of a diff, for "-", or the new one, for "+"."""
    return "".join(re.findall(rf"(?m)^[ {sign}](.*\n)", diff))


def readme_programs():
    """Return the programs of the README by name. Each is the new side of a diff."""
    texts = {"ddp_reference.py": SOURCE}
    for old_name, name, diff in re.findall(
        r"(?ms)^```diff (\S+) (\S+)\n(.*?)^```", README.read_text()
    ):
        # The diff from one.py to many.py shows both as a whole. The others show hunks.
        text = texts.setdefault(old_name, diff_side(diff, "-"))
        for hunk in filter(None, re.split(r"(?m)^@@.*\n", diff)):
            text = edited(text, diff_side(hunk, "-"), diff_side(hunk, "+"))
        texts[name] = text
    return texts


def printed_by(name, world_size, options="", *edits):
    """Return what rank 0 of a README program prints, without `ddp on` and speeds."""
    printed, *_ = run_edited(world_size, options, *edits, text=readme_programs()[name])
    return re.sub(r"ddp on .*\n| \| [\d.]+ samples/s", "", printed)


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


@unittest.skipUnless(README.exists(), "no README.md beside this file")
class ReadmePrograms(TestCase):
    def test_the_sampler_reads_what_the_table_of_experiments_shows(self):
        """It also warns where an order is read twice, as in experiment 2, and nowhere else."""
        rows = re.findall(r"(?m)^\| (\d\. .*?) \| (.*?) \| (.*?) \|", README.read_text())
        assert len(rows) == 9, rows
        for (setting, *shown), rank in product(rows, range(2)):
            dataset = range(int(setting.split()[1]))
            no_sampler, sets_epoch = "no sampler" in setting, "set_epoch" in setting
            sampler = None if no_sampler else ddp.DistributedSampler(dataset, 2, rank)
            loader = DataLoader(dataset, 4, sampler=sampler, drop_last="drop_last" in setting)
            epochs = []
            with mock.patch("warnings.warn") as warn:
                for epoch in range(2):
                    if sets_epoch:
                        sampler.set_epoch(epoch)
                    batches = ["".join(map(str, batch.tolist())) for batch in loader]
                    epochs.append(" ".join(batches) or "-")

            self.assertEqual(", ".join(epochs), shown[rank], f"{setting}, {rank=}")
            self.assertEqual(warn.called, not no_sampler and not sets_epoch, setting)

    def test_the_sampler_reads_what_the_example_of_1000_samples_says(self):
        sampler = ddp.DistributedSampler(range(1000), 2, rank=1)
        sizes = [len(batch) for batch in DataLoader(range(1000), 32, sampler=sampler)]
        text = f"each rank has {sum(sizes)} samples: {len(sizes)} batches, the last of {sizes[-1]}"
        self.assertIn(f"{text}, or {sizes.count(32)} with", README.read_text())

    def test_the_main_job_prints_what_the_readme_shows(self):
        sys.argv = ["ddp_reference.py"]
        args, _ = ddp.parse_args()
        self.assertEqual((args.nproc_per_node, args.shares % args.nproc_per_node), (GPUS or 2, 0))
        ranks = max(number for number in (1, 2, 4, 8) if number <= (GPUS or 2))

        out, *_ = run_job(ranks, "--shares 8")

        job = f"world size {ranks}, global batch size 240 in 8 shares"
        self.assertIn(f"ddp on {'nccl' if GPUS else 'gloo'}, {job}, torch ", out)
        shown = read_numbers(README.read_text())
        printed = {k: v for k, v in read_numbers(out).items() if k.startswith("epoch 5 | loss")}
        shown = {place: shown[place] for place in printed}
        tolerance = 0.001 if GPUS else 0.0001  # A GPU rounds otherwise.
        assert_close(printed, shown, "A number is not the README's.", tolerance)

    def test_programs_print_the_same_on_one_process_and_on_two(self):
        one = printed_by("one.py", 1)
        for name in ("many.py", "dp.py"):
            self.assertEqual(printed_by(name, 2), one, name)
        options = "--epochs 3 --lr 0.1 --shares 4"
        self.assertEqual(*(printed_by("my_job.py", ranks, options) for ranks in (1, 2)))

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
            with self.assertRaisesRegex(mp.ProcessRaisedException, "a.tar is damaged or lacks"):
                printed_by("shards.py", 1, options)


# ---- The processes
PAUSE = """restarts, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if epochs_done > 1.3 and restarts == rank == "0":
        networks = os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
        host = os.environ.get("NCCL_HOSTID")
        print("networks", *networks, "host", host, "workers by", mp.get_start_method())
        signal.pause()
    return 1"""
IGNORE = "    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as after &\n"
ORPHANED = f"""{IGNORE}    os.kill(os.getppid(), signal.SIGKILL)
    mp.parent_process().join()
    if sys.platform"""
INTERRUPT = "    os.kill(os.getpid(), signal.SIGINT)\n    return 1"
STUCK = """if mp.current_process().name.endswith(":2"):  # identify() has started the first.
            print("stuck", flush=True)
            signal.pause()"""
HANGING = f"""{TORCHRUN} --nproc-per-node=2
--max-restarts=1 hanging.py {SMALL} --timeout 15 --checkpoint hanging --checkpoint-every 1"""
# What two processes print is within 1e-5 of one, relative to 8e10.
FOREIGN = """import os, sys
assert sys.argv[1:] == ["a", "--log-every", "1"], sys.argv  # "--log-every", --checkpoint
size = int(os.environ["WORLD_SIZE"])
if os.environ["RANK"] == "0":
    print(f"iter 0: loss=3e-5, iter 1: Loss: {8e10 + 1e5 * size}, took {size / 10} s")"""
FORGETFUL = f"forgetful.py {SMALL} --shares 2 --epochs 20 --lr 0.003"
# name: (command, old, new, ...): NAME.py is ddp_reference.py with edits, for the command.
SLOW_PROGRAMS = {
    "hanging": (HANGING, "return 1", PAUSE),
    # The rank alone gets Ctrl-C.
    "interrupted": (f"interrupted.py {SMALL} --nproc-per-node 1", "    return 1", INTERRUPT),
    # The launcher is dead before this rank asks Linux for its own end.
    "orphan": ("orphan.py --nproc-per-node 1", "    if sys.platform", ORPHANED),
    # The loader worker is stuck, and the rank waits for it. Neither heeds Ctrl-C.
    "stuck": (
        f"stuck.py {SMALL} --shares 1 --nproc-per-node 1 --num-workers 1",
        *("seed_generators(self.seed, self.epoch.item(), index)", STUCK),
        *("    faulthandler.enable()", f"{IGNORE}    faulthandler.enable()"),
    ),
    "foreign": ("-m test_ddp_reference check foreign.py a", SOURCE, FOREIGN),
    # The momentum is lost over the kill, long before the last epoch.
    "forgetful": (
        f"-m test_ddp_reference check {FORGETFUL}",
        *("= resume(path, identity, parts)", '= resume(path, identity, {"net": net})'),
    ),
}


@cache
def slow_programs():
    """Start SLOW_PROGRAMS, with their output in pipes: return them by name."""
    programs = {}
    for name, (command, *edits) in SLOW_PROGRAMS.items():
        Path(f"{name}.py").write_text(edited(SOURCE, *edits))
        programs[name] = Popen(
            [sys.executable, *command.split()],
            text=True,
            stdout=PIPE,
            stderr=PIPE,
            # Ctrl-C must reach the launcher, even if these tests run after &.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        unittest.addModuleCleanup(programs[name].terminate)
    return programs


def wait_for(name, status=0):
    """Return (stdout, stderr) of a slow program when all its processes have ended."""
    program = slow_programs()[name]
    out, err = program.communicate(timeout=300)
    assert program.returncode == status, f"status {program.returncode}: {out}{err}"
    return out, err


class TheProcesses(TestCase):
    def test_no_process_is_left_when_the_launcher_alone_ends(self):
        out, _ = wait_for("orphan", -signal.SIGKILL)
        assert not out, out  # Its rank has ended before it trained.
        wait_for("interrupted", 1)
        launcher = slow_programs()["stuck"]
        assert any(line == "stuck\n" for line in launcher.stdout), wait_for("stuck")
        launcher.send_signal(signal.SIGINT)
        wait_for("stuck", 130)

    def test_a_hang_prints_all_stacks_and_torchrun_restarts(self):
        out, err = wait_for("hanging")

        times = re.findall(r"Timeout \((.*)\)!", err)
        self.assertEqual(times, ["0:00:16.500000", "0:00:18"], err)  # Rank 0 waits longer.
        self.assertRegex(err, " in lr_factor\n")
        self.assertRegex(err, " in (train_step|named_means|check_copies)\n")  # NCCL waits later.
        host = 0 if GPUS < 2 else None
        self.assertIn(f"networks lo lo host {host} workers by spawn\n", out)
        self.assertRegex(out, "resuming .* at epoch 1/2, sample 24")


# ---- bash run.sh check
NUMBER = r"(?i)(?<![\w.])[-+]?(?:(?:\d+\.\d*|\.\d+)(?:e[-+]?\d+)?|\d+e[-+]?\d+|inf|nan)(?!\w|\.\d)"
# Colours, options, times of the clock, and numbers before a unit of time, size or speed.
UNIT = r"(?:[mun]?s|secs?|seconds?|minutes?|h|hours?|[kKMGT]i?B|m?s/\w+)(?![\w/])"
AMBIGUOUS = r"(?:mins?|\w+/s(?:ec)?)(?![\w/])(?![ :=]+[-+.\d])"  # "0.5 min 0.1" may be a minimum.
CLOCK = r"(?<![\w@.])\d+:[0-5]\d(?::[0-5]\d)?(?![\d.])"
NO_RESULT = rf"\x1b\[[\d;]*m|Namespace\(.*|{CLOCK}|(?<![\w.])[-+\d.e]+ ?(?:{UNIT}|{AMBIGUOUS})"
EARLY = """in its first lines: look at the samples and
their order, batch size, random numbers, BatchNorm, and what ranks average or add up"""
LATER = """only after some lines: look at what begins
there (unfreezing, a schedule, a decision of one rank), and at how gradients are averaged; or, if
float64 ends this, it is rounding that has grown, with Adam by a bias before BatchNorm"""
VALIDATION = """only in validation: look at samples
that are read twice or not counted, and at means of means; or rounding has grown in a bias before
BatchNorm under Adam, which running means follow late"""
OTHER_LINES = """by a line that one process lacks: does
each rank print, or does an integer differ?"""


def has_option(job, option):
    return re.search(rf"""["']{option}["']""", Path(job[0]).read_text())


def run_for_check(world_size, job, path, limit=1e6, kill_after=np.inf, show=False):
    """Return what a job prints until it ends, or is killed after so many lines.

    job: a script and its options. path: of its checkpoint. limit: of seconds, after which it seems
    to hang. show: print all but lines of steps.
    """
    command, variables = [sys.executable, *job], {}
    if not has_option(job, "--nproc-per-node"):
        command[1:1] = [*TORCHRUN.split(), f"--nproc-per-node={world_size}"]
        variables["OMP_NUM_THREADS"] = "1"  # Otherwise torchrun sets it, and says so.
        if GPUS == 1:  # Such a script wants a GPU for each process.
            variables["CUDA_VISIBLE_DEVICES"] = ""
    # A later option counts, so the job's --checkpoint stays untouched.
    ours = {"--nproc-per-node": f"{world_size}", "--log-every": "1", "--checkpoint": path}
    for option in filter(partial(has_option, job), ours):
        command += [option, ours[option]]
    end_with_check = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)  # as end_with_parent()
    options = {"env": os.environ | variables, "preexec_fn": end_with_check}
    process = Popen(command, text=True, stdout=PIPE, **options)
    timer = threading.Timer(limit, process.terminate)
    timer.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.replace(path, ""))
            if len(lines) == kill_after:
                process.terminate()  # Its ranks end with it.
            if show and not re.match(r"epoch \d+ \| \d+/", line):
                print(line, end="", flush=True)
        failed, hangs = process.wait(), timer.finished.is_set()
        if failed and len(lines) < kill_after:
            reason = f"seems to hang: it took {limit:.0f} s" if hangs else "failed"
            end = f"after {lines[-1]!r}" if lines else "before its first line"
            sys.exit(f"check: the job {reason} with {world_size} processes, {end}")
    finally:
        timer.cancel()
        process.terminate()
        process.communicate()  # until all its processes have ended
    return "".join(lines)


def read_numbers(printed, ignore="$^"):
    """Return the numbers that a job has printed, by their place, the text of the line before them.

    Of "epoch 0 | loss 0.5 accuracy 0.9" these are "epoch 0 | loss #" and "epoch 0 | loss #
    accuracy #". If such a line comes again, they begin with "(2) ".
    """
    numbers, counts = {}, Counter()
    for line in printed.splitlines():
        line = re.sub(ignore, "", re.sub(NO_RESULT, "", line[:1000])).strip()
        *texts, _ = re.split(NUMBER, line)
        counts[tuple(texts)] += 1
        count = counts[tuple(texts)]
        place = f"({count}) " if count > 1 else ""
        for text, number in zip(texts, re.findall(NUMBER, line)):
            place += f"{text}#"
            numbers[place] = float(number)
    return numbers


def compare(name, numbers, expected, tolerance):
    """Print how far a run is from one process: return the places that differ.

    A difference is relative to the largest number that one process has printed in such a place.
    Places are such if they differ only in digits.
    """

    def kind(place):
        return re.sub(r"^\(\d+\) |\d", "", place)

    largest = {}
    for place, number in expected.items():
        if np.isfinite(number):
            largest[kind(place)] = max(abs(number), largest.get(kind(place), 0))
    apart = {}
    for place in expected | numbers:
        pair = numbers.get(place), expected.get(place)
        if None in pair:
            apart[place] = np.inf
        elif pair[0] == pair[1] or np.isnan(pair).all():
            apart[place] = 0
        else:
            difference = abs(pair[0] - pair[1]) / (largest.get(kind(place)) or 1)
            apart[place] = np.nan_to_num(difference, nan=np.inf, posinf=np.inf)
    differing = [place for place in apart if apart[place] > tolerance]
    note = ""
    if differing:
        first = differing[0]
        note = f" (first at {first}: {numbers.get(first)}, not {expected.get(first)})"
    print(f"{name}: {max(apart.values()):.4f} apart{note}", flush=True)
    return differing


def check(arguments, folder, run=run_for_check):
    """Try whether a job is the same on any number of processes, and over a kill.

    SCRIPT.py is a copy of ddp_reference.py, or any script that torchrun starts. It runs on one
    process, then on 2 and 4 (with several GPUs on up to all), or on the numbers that divide its
    shares. Each line with decimal numbers is compared, but not numbers before a unit of time, size
    or speed. A difference is relative to the largest number of its kind. A job that has the option
    --checkpoint-every is also killed past its middle, and goes on with another number. A run that
    takes 30 times as long as on one process, and a minute, is ended. The status is 0 if nothing
    differs by more than the tolerance. It cannot see what hardly moves the printed numbers (if the
    learning rate is tiny), what a short run never does, what is equally wrong on every number of
    processes, or state that matters only after a kill at another place.
    """
    usage = "bash run.sh check [--tolerance T] [--ignore REGEX] [SCRIPT.py] [its options]"
    parser = ArgumentParser(usage=usage, description=check.__doc__, allow_abbrev=False)
    text = "how far apart printed numbers may be (default: %(default)s)"
    parser.add_argument("--tolerance", type=float, default=0.0005, help=text)
    text = "what else in a line is no result, such as 'mfu \\S+'"
    parser.add_argument("--ignore", default="$^", metavar="REGEX", help=text)
    args, job = parser.parse_known_args(arguments)
    if not job or not job[0].endswith(".py"):
        job = [f"{HERE}/ddp_reference.py", *job]
    try:
        saves = has_option(job, "--checkpoint-every")
        re.compile(args.ignore)
    except (OSError, re.error) as error:
        parser.error(f"{error}")
    began = time.monotonic()
    one = run(1, job, f"{folder}/1", show=True)
    limit = 60 + 30 * (time.monotonic() - began)
    expected = read_numbers(one, args.ignore)
    places = list(expected)
    lines = [place for place in places if place.count("#") == 1]  # their first numbers
    if not np.isfinite([*expected.values()]).any():
        return f"check: {job[0]} prints no decimal numbers (or only nan) on stdout"
    most = GPUS if GPUS > 1 else 4  # Ranks of ddp_reference.py can share one GPU.
    counts = [n for n in (2, 4, 8, 16) if n <= most]
    if shares := re.search(r" in (\d+) shares", one):
        counts = [n for n in range(2, most + 1) if int(shares[1]) % n == 0]
    if not counts:
        return f"check: no number from 2 to {most} divides the shares: set --shares"
    differing = []
    for count in counts:
        numbers = read_numbers(run(count, job, f"{folder}/{count}", limit), args.ignore)
        differing += compare(f"{count} processes", numbers, expected, args.tolerance)

    if differing:
        validation = {place for place in places if re.search("(?i)(val|test)[^#]*#$", place)}
        # The first line may precede all training.
        where = EARLY if differing[0].startswith(tuple(lines[:2])) else LATER
        if validation.issuperset(differing) and len(validation) < len(places):
            where = VALIDATION
        if differing[0] not in places:
            where = OTHER_LINES
        return f"The number of processes changes this job {where}."

    if saves:
        job += ["--checkpoint-every", "1"]
        kill_after = one.count("\n") // 2 + 2
        run(counts[-1], job, f"{folder}/killed", limit, kill_after)
        other = counts[0] if len(counts) > 1 else 1
        numbers = read_numbers(run(other, job, f"{folder}/killed", limit), args.ignore)
        if not 1 < sum(place.count("#") == 1 for place in numbers) < len(lines):
            return "check: no step followed the kill: does the job resume? Or raise --epochs"
        start = re.match(r"[^#]*\d|", next(iter(numbers)))[0]
        name = f"over a kill ({counts[-1]} processes, then {other} from {start})"
        rest = {p: expected[p] for p in places if p in numbers or p == places[-1]}
        if compare(name, numbers, rest, args.tolerance):
            return "Only the resumed job differs: the checkpoint lacks some state."
    else:
        print("No kill was tried, because the job has no --checkpoint-every.")
    print(f"All results are equal within the tolerance of {args.tolerance}.")


class TheCheck(TestCase):
    def test_check_finds_what_only_a_kill_shows(self):
        out, err = wait_for("forgetful", status=1)

        self.assertIn("the checkpoint lacks some state", err)
        self.assertRegex(out, r"\n2 processes: 0\.000\d apart\n")
        self.assertRegex(out, r"\nover a kill \(2 processes, then 1 .* apart \(first at epoch")

    def test_check_starts_any_script_by_torchrun(self):
        out, _ = wait_for("foreign")

        self.assertRegex(out, r"\n2 processes: 0.0000 apart\n(4 .*: 0.0000 apart\n)?No kill")

    def test_check_reads_results_of_any_format(self):
        results = (
            "loss=0.5, Acc@1:98.25% val/score 1e-3 (nan) | -.5; inf. \x1b[1m0.25\x1b[0m min 0.75"
        )
        others = (
            "0.1 h 3.5ms 12:34<56:07 2.5 it/s, 1.5 GB 2 v2.13.0 7.5s/it lr0.1 Namespace(lr=0.1)"
        )
        read = [*read_numbers(f"{results} {others}").values()]
        expected = [0.5, 98.25, 1e-3, np.nan, -0.5, np.inf, 0.25, 0.75]
        np.testing.assert_array_equal(read, expected)

    def test_check_tells_when_runs_begin_to_differ(self):
        """The runs are texts here: of one process, of two, until the kill, and after it."""
        start = "batch 2 in 2 shares\nepoch 0 | 2/4 | loss 0.5000, 98.5%\n"
        step = "epoch 0 | 4/4 | loss 4e-1, nan%\n"
        end = "epoch 0 | val_loss=0.4 in 9.0 s\nepoch 1 | 2/4 | loss 0.3000, 1.00%\n"
        one = start + step + end
        resumed = step + end.replace("9.0", "7.0")
        Path("job.py").write_text("exit(1)  # '--checkpoint-every'")
        for two, after, message in (
            (one.replace("0.5000", "0.5003"), "", "in its first lines"),
            (one.replace("0.3000", "0.3002"), resumed, None),  # just within
            (one.replace("0.3000", "nan"), "", "only after some lines"),
            (one.replace("=0.4", "=0.401"), "", "only in validation"),
            (one + end, "", "by a line that one process lacks"),
            (start + end, "", "in its first lines"),
            (one, one, "no step followed"),
            (one, "", "no step followed"),
            (one, resumed.replace("0.3000", "0.3003"), "the checkpoint lacks"),
            (one, start + step, "the checkpoint lacks"),
        ):
            runs = mock.Mock(side_effect=(one, two, start, after))
            with mock.patch("sys.stdout"):
                self.assertIn(str(message), str(check(["job.py"], "", runs)), (two, after))
        for script, message in ("exit(1)", "failed"), ("import time; time.sleep(99)", "to hang"):
            Path("job.py").write_text(f"{script}  # '--nproc-per-node'")
            with self.assertRaisesRegex(SystemExit, message):
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
            os.environ["TMPDIR"] = folder  # A killed job leaves files there.
            sys.exit(check(sys.argv[2:], folder))
    result = unittest.main(exit=False, verbosity=2).result
    failed, skipped = len(result.failures + result.errors), len(result.skipped)
    passed = max(0, result.testsRun - failed - skipped)  # setUpModule() may have failed.
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed > 0 or not result.testsRun)  # -k may name no test.


if __name__ == "__main__":
    main()
