"""The guarantees of ddp_reference.py, and the command that tries them on your own job.

    bash run.sh test                 # all tests
    bash run.sh test -k Lesson       # only the lessons
    bash run.sh check my_job.py      # is this job the same on any number of processes?

First come six lessons. Each compares what ranks do with something simpler, such as one process with
the whole batch. First read the docstring of ddp_reference.py, which explains the words, and before
each lesson what its title names in brackets.

"To break it" names a line of ddp_reference.py (in Lesson 0, of this file). Cover what follows
"Then", and predict it. Change the line, run the lesson (`bash run.sh test -k Lesson2`) or what the
question names, read the end of the failure (of one rank), and undo the change. In Lessons 1 to
5 one rank is tried first, and passes. With most faults `bash run.sh` ends as if all were well.

The tests need chapter 1 of ddp_reference.py as it is.
"""

import contextlib
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
from argparse import ArgumentParser
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
    if "-k" not in sys.argv:  # With -k, a test starts what it needs.
        slow_programs()


# ---- Lesson 0: the machine (torch.distributed)
# Can this machine add? In training a wrong sum passes for noise, but sums of integers are exact, so
# a single wrong one shows. There is a rank for each GPU, but at least two. Rank r makes the list r,
# r + 1, r + 2 and so on. With W ranks the sum at index i must be W * i + (0 + 1 + ... + W - 1).
# (run_job(), below Lesson 5, starts ranks that call add_up_integers() in place of train(). An error
# on any rank fails the test.) How long would 16 million gradients (64 MB) take?
#
# To break it, leave out `dist.all_reduce(total)` below, in this file. How many sums are wrong?
# Then each rank keeps its own list, i + r in place of 2 * i + 1: on rank 0 all are wrong, on rank 1
# all but the first.
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
# the 12 samples that PyTorch's sampler gives to a single rank.
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


# ---- What Lessons 2 to 5 share: a comparison, data and nets
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


# ---- Lesson 2: a step (train_step)
# A step must move the net as one process with the whole batch would, even if the ranks have
# different numbers of labels. Let rank 0 have one label, with loss 7, and rank 1 three labels, with
# loss 3 each. The mean is 16 / 4 = 4, but the mean of the two ranks' means is (7 + 3) / 2 = 5. So
# each rank computes the gradient of its sum of losses, 7 and 9 (perhaps in micro-batches). DDP
# averages these to the gradient of 16 / 2 = 8. Then train_step() multiplies it by the 2 ranks and
# divides it by the 4 labels, which an all-reduce has counted.
#
# To break it as most loops do, replace `parameter.grad *= factor` by `pass`, and
# `sums[1].backward()` by `(sums[1] / (batch[-1] != -100).sum()).backward()`. Two ranks have 140 and
# 130 labels. What weight does the loss of a label get?
# Then DDP halves 1/140 and 1/130: 1/280 or 1/260, not 1/270. So 0.weight ends up to 0.0005 off.
#
# Or let train_step() call `forward(model.module, micro_batch, amp)`. What does `bash run.sh` say?
# Then DDP.forward(), which prepares averaging, is skipped: check_copies() fails after epoch 0.
# (To mend it, average yourself: replace `parameter.grad *= factor` by
# `dist.all_reduce(parameter.grad.mul_(factor / dist.get_world_size()))`. Then both pass.)
def compare_step(make_net, micro_batch_size, args, device):
    """On a rank: train on its share of a batch, and compare with one process."""
    x, y = Ragged(12).tensors
    expected = make_net()
    F.cross_entropy(expected(x), y).backward()
    # With Adam a step hardly depends on a factor, so a wrong one would not show.
    torch.optim.SGD(expected.parameters(), lr=1).step()

    # This rank has an equal net, and every world_size-th sample. (convert_batch_norm: Lesson 4.)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = ddp.convert_batch_norm(make_net().to(device))
    optimizer = torch.optim.SGD(net.parameters(), lr=1)
    model = ddp.DistributedDataParallel(net)
    ddp.train_step(model, optimizer, (x[rank::world_size], y[rank::world_size]), micro_batch_size)

    for name, start in make_net().state_dict().items():
        moves = (end.state_dict()[name].cpu() - start for end in (net, expected))
        assert_close(*moves, f"{name} of rank {rank} of {world_size} ({micro_batch_size=})")
    print("equal")


class Lesson2Step(TestCase):
    def test_a_step_is_that_of_one_process_with_the_whole_batch(self):
        for world_size, micro_batch_size in product(range(1, 5), (None, 2)):
            printed = run_job(world_size, train=partial(compare_step, plain_net, micro_batch_size))
            assert all("equal" in text for text in printed)


# ---- Lesson 3: evaluation (evaluate)
# Loss and accuracy must be those of one process with all samples, even if 25 samples are shared
# unequally, or if 4 ranks share 2, and some have none. So each rank adds up its own losses and
# labels, and one all-reduce after the loop adds up all ranks' sums. A collective in the loop could
# hang: of 25 samples in batches of 4, rank 0 of 2 has four batches, rank 1 three.
#
# All ranks must evaluate the net of rank 0, which is saved. BatchNorm evaluates with running means
# and variances, and with --local-bn (Lesson 4) each rank has its own.
#
# To break it, leave out `dist.all_reduce(total)` in evaluate(). Do the ranks agree?
# Then the loss is 1.096 on rank 0 and 1.113 on rank 1, not 1.104. Both look right, and a job prints
# only that of rank 0.
#
# Or replace `dist.broadcast(buffer, src=0)` by `pass`. Do the ranks agree?
# Then they do, but on a wrong loss, 1.100: it is one sum, of losses by different statistics.
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

    assert sums[0] > 0
    means = (sums[1:] / sums[0]).tolist()
    assert_close(means, expected, f"Loss and accuracy of rank {rank} of {world_size}")
    print("equal")


class Lesson3Evaluation(TestCase):
    def test_loss_and_accuracy_are_those_of_one_process(self):
        for world_size, num_samples in product(range(1, 5), (25, 2)):
            printed = run_job(world_size, train=partial(compare_evaluation, num_samples))
            assert all("equal" in text for text in printed)


# ---- Lesson 4: BatchNorm over the job (chapter 8)
# A BatchNorm layer normalizes by the mean and variance of what it sees. Let rank 0 have the values
# 1 and 5, and rank 1 the values 3 and 3. With --local-bn rank 0 gets -1 and 1. After
# convert_batch_norm() each rank sees all four, with mean 3 and variance 2, and keeps its own
# results: about -1.4 and 1.4 on rank 0, and zeros on rank 1.
#
# So a value of rank 0 now also changes the loss of rank 1: if the 5 becomes 6, the mean becomes
# 3.25, and the results of rank 1 fall from 0 to about -0.14. DDP combines only the gradients of
# parameters, so AllGather.backward() adds up those of a layer's input.
#
# Lesson 2 then holds for a net with BatchNorm, but not in micro-batches, because a layer sees only
# one of them at a time. (On GPUs nn.SyncBatchNorm replaces our functions. To break ours, hide the
# GPUs: put `CUDA_VISIBLE_DEVICES=` before `bash`.)
#
# To break it, let AllGather.backward() return only what this rank has computed for its samples,
# `gradient.chunk(dist.get_world_size())[dist.get_rank()]`. Does `bash run.sh` find unequal nets?
# Then inputs lack the gradient of the other rank's loss. DDP averages, so the nets are equal, but
# wrong: val_accuracy ends at 0.905, not 0.935.
#
# Or divide what it returns by `dist.get_world_size()`. How far does 0.weight move?
# Then this function and DDP both divide by 2, but train_step() multiplies by 2 only once. So on two
# ranks 0.weight (of the first layer) moves half as far, because the last, BatchNorm, halves it.
class Lesson4BatchNorm(TestCase):
    def test_batch_norm_sees_the_samples_of_all_ranks(self):
        for world_size in range(1, 5):
            printed = run_job(world_size, train=partial(compare_step, net_with_batch_norm, None))
            assert all("equal" in text for text in printed)


# ---- Lesson 5: the number of ranks, and stops (chapter 4)
# plain_loop(), below, is plain PyTorch in one process. It computes each batch as a whole, and never
# resumes. A job with augmentation, a warm-up, clipping, uneven labels and two learning rates must
# end with the loop's net on any number of ranks, even if killed and resumed on another number, or
# in micro-batches (without BatchNorm, see Lesson 4). It does, because
# - a step's samples (Lesson 1), gradient (2) and BatchNorm (4) are those of one process,
# - the random numbers of an item follow from the seed, the epoch and the index,
# - the learning rate follows from the epoch and the count of samples read, not from a run's steps,
# - the checkpoint holds this epoch and count, the net, and the optimizer with its momentum.
#
# To break it, leave out `// dist.get_world_size()` in make_loaders(). How many of the five steps of
# an epoch does `bash run.sh --nproc-per-node 2 --log-every 1` print?
# Then two: each reads 480 but counts 240. The other 240 of 1200 are left out.
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
    """Return a task. With --micro-batch-size its net has no BatchNorm."""
    net = plain_net() if args.micro_batch_size else ddp.ConvNet()
    groups = []
    for number, parameter in enumerate(net.to(device).parameters()):
        groups.append({"params": [parameter], "lr": args.lr * (1 + number % 2)})
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
    return Augmented(NUM_SAMPLES), Ragged(10), net, optimizer


def plain_loop(args, device):
    """In place of train(): do the same in plain PyTorch, with equal random numbers."""
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = make_augmented_task(args, device)
    base_lrs = [group["lr"] for group in optimizer.param_groups]
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
            for group, lr in zip(optimizer.param_groups, base_lrs):
                group["lr"] = lr * min(1, epoch + step * batch_size / NUM_SAMPLES + 0.1)
            optimizer.step()
            optimizer.zero_grad()
    torch.save({"net": net.state_dict()}, args.checkpoint)


def stop_at(stop_after, args, epochs_done):
    """In place of lr_factor(): warm up, and end like a killed process after so many epochs."""
    if epochs_done >= stop_after:
        os._exit(0)
    return np.float64(min(1, epochs_done + 0.1))  # A NumPy number must work, too.


def net_after(options, runs, **replacements):
    """Do runs (ranks, stop_after), each resuming the one before: return the last net."""
    path = f"{tempfile.mkdtemp(dir='.')}/ck"
    options = f"{options} --checkpoint {path} --checkpoint-every 1"
    for number, (ranks, stop_after) in enumerate(runs):
        replacements["lr_factor"] = partial(stop_at, stop_after)
        printed, *_ = run_job(ranks, options, **replacements)
        assert ("resuming" in printed) == (number > 0), runs
    return torch.load(path, map_location="cpu")["net"]


class Lesson5NumberOfRanks(TestCase):
    def test_a_job_ends_as_a_plain_loop_does(self):
        # Steps begin at 0, 12/47 and 24/47 of an epoch, so it is stopped before steps 3 and 5 of 6.
        stopped = [(4, 0.5), (3, 1.2), (2, np.inf)]
        for option, runs in (
            ("--num-workers 1", [(1, np.inf)]),
            ("", stopped),
            ("--micro-batch-size 2", stopped),
        ):
            options = f"{OPTIONS} {option}"
            expected = net_after(options, [(1, np.inf)], train=plain_loop)
            net = net_after(options, runs, make_task=make_augmented_task)
            assert_close(net, expected, f"(ranks, epochs until a stop): {runs}, {options}")


# ---- The other guarantees: what is refused, printed and saved
# A new option that changes the net goes into OPTIONS and plain_loop() (Lesson 5), any other into a
# test of its own. Then leave it out of each call that passes it on: a test must fail.
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
    sys.argv = ["ddp_reference.py", *f"--timeout 60 {options}".split()]
    with open(f"rank{rank}", "w") as out, contextlib.redirect_stdout(out):
        ddp.main()
    assert not dist.is_initialized()


def run_job(world_size, options="", **replacements):
    """Run a job on so many ranks: return what each rank printed.

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


def edited(text, *edits):
    """Return a program in which texts are replaced. edits: old, new, old, new and so on."""
    for old, new in zip(edits[::2], edits[1::2]):
        assert text.count(old) == 1, f"not once in the program: {old}"
        text = text.replace(old, new)
    return text


def be_program():
    """In place of main(): run program.py. Without a GPU for each rank, it sees none."""
    if int(os.environ["WORLD_SIZE"]) > GPUS:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    runpy.run_path("program.py", run_name="__main__")


def run_edited(world_size, options, *edits, text=SOURCE):
    """Run a program, with edits, on so many ranks: return what each rank printed."""
    Path("program.py").write_text(edited(text, *edits))
    return run_job(world_size, options, main=be_program)


# A small job with four steps an epoch. If an option is given twice, the later one counts.
SMALL = "--num-samples 48 --length 64 --epochs 2 --global-batch-size 12"

ADAM = "Adam(net.parameters()"
BATCHES = "watched(train_loader, args.timeout)"
WRAP = "model = DistributedDataParallel(net)"
ON_GPU = "next(net.parameters()).is_cuda", "True"
# (options, pattern, old, new): two ranks that resume ck with these options and edits must fail with
# this pattern, leave ck as it was, and make no file `new`.
FAULTS = (
    ("--seed 9 --num-samples 60 --global-batch-size 24", r"seed=0, .*size=12, len.*=48, data="),
    ("--num-samples 6", "larger than the training set"),
    ("--lr inf", "is not finite, so nothing was written to .*ck"),
    ("--checkpoint code", "Weights only load failed"),
    ("--checkpoint flipped", "flipped is damaged .*: .*a checksum is wrong"),
    ("", "with optimizer Adam, parameters=", ADAM, "SGD(reversed([*net.parameters()])"),
    ("", "that the net lacks", ADAM, "Adam([nn.Parameter(torch.ones(()))]"),
    ("", "of a job with SUMS=.*accuracy", '"accuracy")', '"top1")'),
    ("", "an item differs", "dataset[index]", "dataset[index][0].mul_(2),"),
    ("--checkpoint new", "to .*new: .*numpy", ADAM, f"{ADAM}, eps=np.float64(1)"),
    ("", r"not all find .*\(0, 0\).*\(2, 0\)", "= resume(path", "= resume(path + 'x' * rank"),
    ("--checkpoint new", "data.*'data=.*'data=", "length, args.seed)", "length, dist.get_rank())"),
    ("--local-bn", "nets differ .*0.weight", WRAP, f"{WRAP}; net[0].weight.data += rank"),
    ("", "nets differ .*1.running_var", "model.train()", "net[1].running_var += rank"),
    ("", r"needs DistributedDataParallel\(net\)", WRAP, "model = net"),
    ("", "a batch must be tensors", BATCHES, "[{'x': 0}]"),
    ("", "the sample as dim", BATCHES, "[(torch.ones(1), torch.ones(2))]"),
    ("", "cannot replace .*Own", *ON_GPU, "nn.BatchNorm1d(", 'type("Own", (nn.BatchNorm1d,), {})('),
    ("", "to .*ck: OSError.*No space left", 'open(f"{path}.tmp"', 'open("/dev/full"'),
)


def make_timed_task(args, device):
    """Return a task with uneven labels, random items in validation, and a net without BatchNorm."""
    time.perf_counter = iter(range(0, 99, 2)).__next__  # Each look at the clock takes two seconds.
    net = plain_net().to(device)
    return Ragged(48), Augmented(25), net, torch.optim.Adam(net.parameters(), lr=args.lr)


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

    def test_what_cannot_work_is_refused_in_one_line(self):
        for options, variables, pattern in (
            ("--nproc-per-node 7", {}, "must be a multiple of the number of processes"),
            ("--checkpoint-every 1", {}, "--checkpoint-every needs --checkpoint"),
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

    def test_a_step_calls_two_collectives_and_never_item(self):
        profiled = """    with torch.profiler.profile() as profile:
        train(args, device)
    print([event.name for event in profile.events()])"""
        # Reading a sample calls .item(). Both jobs read 84, in 14 steps of 6 and 6 of 14, so they
        # differ by what 8 steps call. Adam on a CPU also calls it, so this task uses SGD.
        edits = "    train(args, device)", profiled, ADAM, "SGD(net.parameters()"
        options = f"{SMALL} --num-samples 42 --micro-batch-size 2 --clip-grad-norm 1 --local-bn"
        of_14_steps, _ = run_edited(2, f"{options} --global-batch-size 6", *edits)
        of_6_steps, _ = run_edited(2, f"{options} --global-batch-size 14", *edits)

        for operator, expected in (("c10d::", 2 * 8), ("aten::item", 0)):
            of_8_steps = of_14_steps.count(operator) - of_6_steps.count(operator)
            self.assertEqual(of_8_steps, expected, operator)

    def test_ranks_steps_and_micro_batches_draw_their_own_numbers(self):
        """Dropout masks differ, also after a stop. With --amp all logits are bfloat16.

        Batches without a label, --local-bn, and a text as state of the net are no errors.
        """
        # Each micro-batch draws, as dropout does. Items do not seed, as if workers read them.
        draw = """        output = model(*inputs)
        assert output.dtype == torch.bfloat16
        assert len(output) <= 3
        if output.requires_grad:
            assert torch.randint(2**16, ()) != np.random.randint(2**16)
            print("number", torch.rand(1, device=device).item())
        return batch_sums(output, 0 * y - 100"""
        extra = "ConvNet.get_extra_state = ConvNet.set_extra_state = lambda *_: 'text'"
        edits = (
            *("        return batch_sums(model(*inputs), y", draw),
            *("seed_generators(self.seed, self.epoch.item(), index)", "pass"),
            *("(*layers[:-1])", f"(*layers[:-1])\n        {extra}"),
        )
        options = f"{SMALL} --micro-batch-size 3 --amp --checkpoint drawn --checkpoint-every 1"
        stop = "return 1", "return 1 if epochs_done < 1.3 else os._exit(0)"
        until_stop = run_edited(2, f"{options} --local-bn", *edits, *stop)
        after_stop = run_edited(2, options, *edits)

        drawn = re.findall(r"number \S+", "".join(until_stop + after_stop))
        # 2 ranks make 8 steps of 2 micro-batches.
        assert len(set(drawn)) == len(drawn) == 32, drawn

    def test_all_printed_numbers_are_those_of_the_job(self):
        # With a learning rate of 0 the net stays what it is.
        means = "loss {:.4f} accuracy {:.4f}".format(*loss_and_accuracy(plain_net(), Ragged(48)))
        val_set = ddp.SeededItems(Augmented(25), seed=1)
        assert val_set.epoch.is_shared(), "forked loader workers would not see the epoch"
        all_means = means + " | val_loss {:.4f} val_accuracy {:.4f}".format(
            *loss_and_accuracy(plain_net(), val_set)
        )
        # What a killed job has left of a file does no harm, and a link stays a link.
        os.symlink("target", "link")
        Path("target.tmp").write_text("half a file")
        options = f"{SMALL} --lr 0 --log-every 4 --checkpoint link --checkpoint-every 2"
        run_three = partial(run_job, 3, make_task=make_timed_task)
        # The first run saves --lr 1, which must not come back, and ends before its first step.
        run_three(f"{options} --lr 1", lr_factor=partial(stop_at, 0))
        assert os.path.exists("target")
        run_three(options, lr_factor=partial(stop_at, 0.7))

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

    def test_the_main_job_prints_what_the_readme_shows(self):
        sys.argv = ["ddp_reference.py"]
        world_size = ddp.parse_args()[0].nproc_per_node

        out, *_ = run_job(world_size)

        kind = f"nccl, world size {GPUS}, cuda" if GPUS else "gloo, world size 2, cpu"
        self.assertIn(f"ddp on {kind}, global batch size 240, torch ", out)
        printed, shown = (read_means(text)["epoch 5"] for text in (out, README.read_text()))
        tolerance = 0.001 if GPUS else 0.0001  # A GPU rounds otherwise.
        assert_close(printed, shown, "A number is not the README's.", tolerance)

    def test_programs_print_the_same_on_one_process_and_on_two(self):
        one = printed_by("one.py", 1)
        for name in ("many.py", "dp.py"):
            self.assertEqual(printed_by(name, 2), one, name)
        options = "--epochs 3 --lr 0.1"
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
        print("networks", *networks, "workers by", mp.get_start_method())
        signal.pause()
    return 1"""
IGNORE = "    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as after &\n"
ORPHANED = f"""{IGNORE}    os.kill(os.getppid(), signal.SIGKILL)
    mp.parent_process().join()
    if sys.platform"""
STUCK = """if mp.current_process().name.endswith(":2"):  # identify() has started the first.
            print("stuck", flush=True)
            signal.pause()"""
HANGING = f"""-m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=2
--max-restarts=1 hanging.py {SMALL} --timeout 15 --checkpoint hanging --checkpoint-every 1"""
FORGETFUL = f"forgetful.py {SMALL} --global-batch-size 22 --epochs 20 --lr 0.003"
# name: (command, old, new, ...): NAME.py is ddp_reference.py with edits, for the command.
SLOW_PROGRAMS = {
    "hanging": (HANGING, "return 1", PAUSE),
    # The launcher is dead before this rank asks Linux for its own end.
    "orphan": ("orphan.py --nproc-per-node 1", "    if sys.platform", ORPHANED),
    # The loader worker is stuck, and the rank waits for it. Neither heeds Ctrl-C.
    "stuck": (
        f"stuck.py {SMALL} --nproc-per-node 1 --num-workers 1",
        *("seed_generators(self.seed, self.epoch.item(), index)", STUCK),
        *("    faulthandler.enable()", f"{IGNORE}    faulthandler.enable()"),
    ),
    # The momentum is lost over the kill, long before the last epoch. Of 2 to 4 only 2 divides 22.
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
    def test_the_watchdog_restarts_at_each_batch_and_is_stopped(self):
        printed, of_rank_1 = run_edited(
            2,
            f"{SMALL} --epochs 1 --num-samples 12",
            "faulthandler.dump_traceback_later(",
            '(lambda seconds, exit: print("started", seconds, exit))(',
            "faulthandler.cancel_dump_traceback_later()",
            'print("stopped")',
        )

        # On rank 0: at the start, at one batch of training, at three of validation (13 samples).
        self.assertRegex(printed, r"^started 63.0 True\nddp.*\n(started.*\n){4}epoch.*\nstopped\n$")
        self.assertRegex(of_rank_1, r"^(started 61.5 False\n){4}stopped\n$")

    def test_no_process_is_left_when_the_launcher_alone_ends(self):
        out, _ = wait_for("orphan", -signal.SIGKILL)
        assert not out, out  # Its rank has ended before it trained.
        launcher = slow_programs()["stuck"]
        assert any(line == "stuck\n" for line in launcher.stdout), wait_for("stuck")
        launcher.send_signal(signal.SIGINT)
        wait_for("stuck", 130)

    def test_a_hang_prints_all_stacks_and_torchrun_restarts(self):
        out, err = wait_for("hanging")

        times = re.findall(r"Timeout \((.*)\)!", err)
        self.assertEqual(times, ["0:00:16.500000", "0:00:18"])  # Rank 0 waits longer.
        for function in ("lr_factor", "train_step"):
            assert f" in {function}\n" in err, err
        assert "networks lo lo workers by spawn\n" in out, out
        self.assertRegex(out, "resuming .* at epoch 1/2, sample 24")


# ---- bash run.sh check
FROM_THE_FIRST_STEP = """from the first step on: look at
the samples and their order, the batch size, random numbers (dropout, collate function), BatchNorm,
and a loss that knows its rank"""
LATER = """only after some steps: if float64
ends this (net.double() and such inputs in make_task, and no --amp), it is rounding that grows, with
Adam perhaps by a bias before BatchNorm; otherwise look at how losses and gradients are averaged, or
at evaluation if only epochs differ"""


def run_for_check(world_size, job, path, kill_at=None, show=False):
    """Return what a job prints until it ends, or is killed at a line that contains kill_at.

    job: a program and its options. path: of its checkpoint. show: print all but lines of steps.
    """
    # A later option counts, so the job's --checkpoint stays untouched.
    ours = f"--nproc-per-node {world_size} --log-every 1 --checkpoint".split()
    command = [sys.executable, *job, *ours, path]
    process = Popen(command, text=True, stdout=PIPE, preexec_fn=ddp.end_with_parent)
    printed = ""
    try:
        for line in process.stdout:
            printed += line
            if kill_at and kill_at in line:
                process.kill()
            if show and ("samples/s" in line or not line.startswith("epoch")):
                print(line, end="", flush=True)
        if process.wait() not in (0, -signal.SIGKILL if kill_at else 0):
            sys.exit(f"check: the job failed with {world_size} processes")
    finally:
        process.kill()
        process.communicate()  # until all its processes have ended
    return printed


def read_means(printed):
    """Return the means that a job has printed by their place, as in "epoch 0 | 240/1200"."""
    means = {}
    for place, line in re.findall(r"\b(epoch \d+(?: \| \d+/\d+)?) \| (.*)", printed):
        numbers = np.array(re.findall(r" (-?\d+\.\d+|-?inf|nan)\b(?! samples/s)", line), float)
        means[place] = np.where(np.isfinite(numbers), numbers, 1e9)  # so that nan equals nan
    return means


def compare(name, printed, one, tolerance):
    """Print how far a run is from one process: return the first place that differs, or None."""
    means, expected = read_means(printed), read_means(one)
    places = list({**expected, **means})
    apart = {}
    for place in places[places.index(next(iter(means))) :]:  # A resumed run begins later.
        # A place that one of them lacks is inf apart.
        difference = means.get(place, np.inf) - expected.get(place, np.inf)
        apart[place] = np.abs(difference).max(initial=0).round(6)
    first = next((place for place in apart if apart[place] > tolerance), None)
    note = f" (first {apart[first]:.4f} at {first})" if first else ""
    speeds = [max(map(float, re.findall(r"([\d.]+) samples/s", text))) for text in (printed, one)]
    ratio = f"{speeds[0]} samples/s, {speeds[0] / speeds[1]:.2f} times"
    print(f"{name}: {max(apart.values()):.4f} apart{note} | {ratio}", flush=True)
    return first


def check(arguments, folder, run=run_for_check):
    """Try whether a job is the same on any number of processes, and over a kill.

    The job runs on one process, and on each larger number that divides its global batch (up to 4 on
    CPUs, and up to all GPUs). If these are equal, it is killed past its middle, and goes on with
    another number. The line of each step is compared. The status is 0 if nothing differs by more
    than the tolerance, and otherwise 1. It cannot see what hardly moves the printed numbers (if the
    learning rate is tiny), what is equally wrong on every number of processes, or state that
    matters only after a kill at another place.
    """
    usage = "bash run.sh check [--tolerance T] [JOB.py] [options of the job]"
    parser = ArgumentParser(usage=usage, description=check.__doc__, allow_abbrev=False)
    text = "how far apart two printed means may be (default: %(default)s)"
    parser.add_argument("--tolerance", type=float, default=0.0005, help=text)
    args, job = parser.parse_known_args(arguments)
    if not job or not job[0].endswith(".py"):
        job = [f"{HERE}/ddp_reference.py", *job]
    one = run(1, job, f"{folder}/1", show=True)
    batch = re.search(r"global batch size (\d+)", one)
    steps = [place for place in read_means(one) if "/" in place]
    if not batch or not steps or "samples/s" not in one:
        return f"check: cannot read what {job[0]} prints: it must be like ddp_reference.py"
    most = GPUS if GPUS > 1 else 4  # Ranks can share one GPU.
    counts = [n for n in range(2, most + 1) if int(batch[1]) % n == 0]
    if not counts:
        return f"check: no number from 2 to {most} divides the global batch of {batch[1]}"
    differing = []
    for count in counts:
        printed = run(count, job, f"{folder}/{count}")
        differing.append(compare(f"{count} processes", printed, one, args.tolerance))

    if any(differing):
        where = FROM_THE_FIRST_STEP if steps[0] in differing else LATER
        return f"The number of processes changes this job {where}."

    job += ["--checkpoint-every", "1"]
    run(counts[-1], job, f"{folder}/killed", kill_at=f"{steps[len(steps) // 2]} |")
    other = counts[0] if len(counts) > 1 else 1
    printed = run(other, job, f"{folder}/killed")
    start = re.search("resuming .* at (.*)", printed)
    if not start or not any("/" in place for place in read_means(printed)):
        return "check: no step followed the kill: does the job save? Or raise --epochs"
    name = f"over a kill ({counts[-1]} processes, then {other} from {start[1]})"
    if compare(name, printed, one, args.tolerance):
        return "Only the resumed job differs: the checkpoint lacks some state."
    print(f"All results are equal within the tolerance of {args.tolerance}.")


class TheCheck(TestCase):
    def test_check_finds_what_only_a_kill_shows(self):
        out, err = wait_for("forgetful", status=1)

        self.assertIn("the checkpoint lacks some state", err)
        self.assertRegex(out, r"\n2 processes: 0\.000\d apart ")
        self.assertRegex(out, r"\nover a kill \(2 processes, then 1 .* apart \(first 0.*epoch")

    def test_check_tells_when_runs_begin_to_differ(self):
        """The runs are texts here: of one process, of two, until the kill, and after it."""
        start = "global batch size 2\nepoch 0 | 2/4 | loss 0.5000\n"
        step = "epoch 0 | 4/4 | loss 0.4000\n"
        end = "epoch 0 | loss 0.4000 | 9.0 samples/s\nepoch 1 | 2/4 | loss 0.3000\n"
        one, resuming = start + step + end, "resuming ck at epoch 0/2, sample 2\n"
        for two, resumed, message in (
            (one.replace("0.5000", "0.5006"), "", "from the first step on"),
            (one.replace("0.3000", "0.3005"), resuming + step + end, None),  # just within
            (one.replace("0.3000", "nan"), "", "only after some steps"),
            (one + "epoch 2 | 2/4 | loss 0.3000\n", "", "only after some steps"),
            (start + end, "", "only after some steps"),
            (one, one, "no step followed"),
            (one, resuming, "no step followed"),
            (one, resuming + step + end.replace("0.3000", "0.3006"), "the checkpoint lacks"),
        ):
            runs = mock.Mock(side_effect=(one, two, start, resumed))
            with mock.patch("sys.stdout"):
                self.assertIn(str(message), str(check(["my_job.py"], "", runs)))  # None: all equal.
        with self.assertRaisesRegex(SystemExit, "failed"):
            run_for_check(1, ["-c", "exit(1)"], "ck")


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
