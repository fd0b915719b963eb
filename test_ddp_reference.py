"""The guarantees of ddp_reference.py, and two commands: `check` and `review`.

    bash run.sh test                 # all tests
    bash run.sh check my_job.py      # is this job the same on any number of processes?
    bash run.sh review practice      # write faulty programs into the folder practice

First come six lessons. Each compares what ranks do with something simpler, such as one process with
the whole batch. Read the docstring of ddp_reference.py first, which explains the words, and before
each lesson the functions that its title names.

Each lesson ends with a line to change, in ddp_reference.py except in Lesson 0, and a question.
Predict the answer, change the line, run the lesson (`bash run.sh test -k Lesson2`), compare its
message with your answer, and undo the change. The answers stand at the end of this file. A training
with one of these faults looks normal, which is why a reviewer has to find them.
"""

import atexit
import contextlib
import faulthandler
import io
import logging
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import traceback
import unittest
from argparse import REMAINDER, ArgumentParser
from functools import cache, partial
from itertools import product, zip_longest
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
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
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
SOURCE = Path(ddp.__file__).read_text()
GPUS = torch.cuda.device_count()
# When a rank fails, mp.start_processes() raises one of these.
FAILED = (mp.ProcessExitedException, mp.ProcessRaisedException)

os.environ |= {
    "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # Otherwise torchrun's restarts may hang.
    "NVIDIA_TF32_OVERRIDE": "0",  # TF32 rounds more than a CPU does.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # Counting GPUs must not start CUDA: ranks are forked.
    "NCCL_ALGO": "Ring",  # Other algorithms may round in another way in each run.
    "KINETO_LOG_LEVEL": "9",  # The profiler prints nothing.
}
# A cluster may have set these for jobs of its own.
CLUSTER = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"]
CLUSTER += ["OMP_NUM_THREADS", "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "PYTHONUNBUFFERED"]
for variable in CLUSTER:
    os.environ.pop(variable, None)


def setUpModule():
    """Work in an empty folder, and start the slow programs, which run beside the tests."""
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    unittest.addModuleCleanup(os.chdir, HERE)
    os.chdir(folder.name)
    os.environ["TMPDIR"] = folder.name  # Programs that are killed leave files there.
    unittest.addModuleCleanup(faulthandler.cancel_dump_traceback_later)
    logging.disable()  # PyTorch would log each rank that it ends.
    for number in (signal.SIGINT, signal.SIGTERM):  # End at once. (& would turn SIGINT off.)
        signal.signal(number, signal.default_int_handler)
    if not any(word.startswith("-k") for word in sys.argv):  # With -k, a test starts what it needs.
        for name in SLOW_PROGRAMS:
            start(name)


# ---- Lesson 0: the machine (5 seconds)
# Can the processes of this machine add? In training a wrong sum looks like noise, but a wrong sum
# of integers is plain. Rank r lists r, r + 1, r + 2 and so on. So with W ranks the sum at index i
# is W * i + (0 + 1 + ... + W - 1). The lesson also prints how fast sums arrive: bytes / time. As a
# rule of thumb, server GPUs of one machine reach 10 GB/s or more, and with NVLink 100 GB/s. Much
# less means that they talk through the CPU or through sockets: NCCL_DEBUG=INFO tells why.
#
# To break it, leave out `dist.all_reduce(total)` below. With two ranks, how many sums are then
# wrong on rank 0, and how many on rank 1? (With more ranks, all are wrong on each.) The message
# begins with "AssertionError: 0 !=", and the lines above it count the wrong sums.
def add_up_integers(args, device):
    """In place of train(): count the sums that are wrong, and time sums of float32."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    integers = torch.arange(2**20, dtype=torch.int32, device=device)
    expected = world_size * integers + sum(range(world_size))
    total = integers + rank
    dist.all_reduce(total)
    wrong = (total != expected).sum().item()
    print(f"rank {rank} of {world_size} on {device}: {wrong} of {len(total)} sums are wrong")

    for size in (4 * 2**10, 2**20, 64 * 2**20):  # bytes
        numbers = torch.zeros(size // 4, device=device)
        for repeat in range(6):
            if repeat == 1:  # The first all-reduce also sets up the connection.
                numbers[0].item()  # This waits for a GPU.
                start_time = time.perf_counter()
            dist.all_reduce(numbers)
        numbers[0].item()
        seconds = (time.perf_counter() - start_time) / 5
        speed = f"{seconds * 1e6:.0f} microseconds, {size / seconds / 1e9:.2f} GB/s"
        if rank == 0:
            print(f"all-reduce of {size // 2**10} KB: {speed}")


class Lesson0Machine(TestCase):
    def test_all_ranks_add_up_integers_exactly(self):
        ranks = max(GPUS, 2)

        printed = "".join(run_job(ranks, train=add_up_integers))

        print(printed)
        self.assertEqual(printed.count(": 0 of"), ranks)


# ---- Lesson 1: which samples a rank reads (DistributedSampler; 2 seconds; rows 3 to 5)
# All ranks shuffle alike, anew each epoch (set_epoch). The samples are then dealt like cards, one
# to each rank in turn. So a step that takes the next 12 has the same samples on 1, 2, 3 or 4 ranks,
# and a job that stopped after 12 samples goes on with the 13th, on any of these numbers of ranks.
# One process plays all ranks here.
#
# To break it, leave out `+ self.rank` in DistributedSampler. Which samples do two ranks read, and
# how often? The message begins with "AssertionError: Lists differ".
class Lesson1Sampler(TestCase):
    maxDiff = 500  # A longer difference is not shown.

    def test_a_step_has_the_same_samples_on_any_number_of_ranks(self):
        dataset = range(24)
        one_rank = TorchSampler(dataset, num_replicas=1, rank=0)
        one_rank.set_epoch(3)
        for ranks, samples_read in product((1, 2, 3, 4), (0, 12)):
            expected = list(one_rank)[samples_read:]
            samplers = [ddp.DistributedSampler(dataset, ranks, rank) for rank in range(ranks)]
            for sampler in samplers:
                sampler.set_epoch(3, samples_read)

            dealt = [sample for turn in zip(*samplers) for sample in turn]

            self.assertEqual(dealt, expected, f"on {ranks} ranks, after {samples_read} samples")
            self.assertEqual(len(samplers[0]) * ranks, len(dealt))


# ---- Lessons 2 to 5 run small jobs
# run_job(ranks, options, name=value), which stands after the lessons, runs ddp_reference.py on so
# many ranks. Names of the file, such as make_task, are replaced by values of ours. It returns what
# each rank printed.
OPTIONS = "--epochs 2 --global-batch-size 12 --lr 0.1 --seed 5"


class Ragged(ddp.SyntheticDataset):
    """Signals, scaled by random numbers. The first 0, 10, 20, 30 or 40 labels are ignored."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        y[: index % 5 * 10] = -100
        return x * (torch.rand(()) + np.random.rand() + random.random()), y


def plain_net():
    """Return a net without BatchNorm."""
    return nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 1))


def make_task_with(make_net, train_set, args, device):
    """In place of make_task(): return this net and data, and two learning rates."""
    net = make_net().to(device)
    first, *others = net.parameters()
    groups = [{"params": [first], "lr": 2 * args.lr}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, weight_decay=0.1)
    return train_set, Ragged(26, 40, seed=1), net, optimizer


def saved_net(ranks, options, make_net, train_set, **replacements):
    """Run a job with this task, and return the state of the net that it saves."""
    make_task = partial(make_task_with, make_net, train_set)
    run_job(ranks, f"{OPTIONS} --checkpoint saved {options}", make_task=make_task, **replacements)
    net = torch.load("saved", map_location="cpu")["net"]
    os.remove("saved")  # The next job begins anew.
    return net


def assert_close(actual, expected, what, tolerance=2e-5):
    """Assert that numbers or tensors are equal, by default up to the rounding of float32."""
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{text}\n{what}"
    )


def assert_same_lines(actual, expected):
    """Assert that printed lines are equal. On GPUs, means may differ in their last digit."""
    mean = r"\d+\.\d{3,}"
    numbers = []
    for text in (actual, expected):
        numbers.append(torch.tensor([float(number) for number in re.findall(mean, text)]))
    assert_close(*numbers, "", 1e-4 if GPUS else 0)
    TestCase().assertEqual(re.sub(mean, "#", actual), re.sub(mean, "#", expected))


# ---- Lesson 2: a step (count_labels, batch_sums, train_step; 8 seconds; rows 12 and 13)
# A step must move the net as one process with the whole batch would, even if ranks have unequal
# numbers of labels. Let rank 0 have one label of loss 7, and rank 1 three of loss 3. The mean of
# the four is (7 + 9) / 4 = 4, but the mean of the ranks' means, as in tutorials, is 10 / 2 = 5. So
# train_step() first counts all 4 labels by an all-reduce. It multiplies each rank's sum of losses
# by 2 ranks / 4 labels, which makes 3.5 and 4.5. DDP averages the gradients of these, and the
# average of 3.5 and 4.5 is 4.
#
# To break it, let each rank take its own mean: in train_step(), write `loss = share_sums[0] /
# count_labels(batches[share])`. In the first step, two ranks with a share each have 110 and 160
# labels. What weight does the loss of one label get in the averaged gradient, on rank 0 and on rank
# 1, and what weight should it get? So on how many ranks does the lesson fail first? The message
# begins with "AssertionError: Tensor-likes are not close!", and its last line names that number.
def tutorial_step(model, optimizer, batches, seeds, *_):
    """In place of train_step(): a tutorial's step with one share, which is right on one rank."""
    (share, (x, y)) = next(iter(batches.items()))
    ddp.seed_generators(*seeds, share)
    model.broadcast_buffers = True  # as DDP does by default
    F.cross_entropy(model(x.to(model.device)), y.to(model.device)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return 0  # It returns no sums.


class Lesson2Step(TestCase):
    def test_a_step_is_that_of_one_process_with_the_whole_batch(self):
        task = (plain_net, Ragged(12, 40, seed=0))
        expected = saved_net(1, "--shares 1", *task, train_step=tutorial_step)
        for ranks in (1, 2, 3, 4):
            net = saved_net(ranks, f"--shares {ranks}", *task)
            assert_close(net, expected, f"with {ranks} shares on {ranks} ranks")
        for ranks in (1, 2, 3, 4):
            net = saved_net(ranks, "--shares 12", *task)  # Two of these shares have no labels.
            assert_close(net, expected, f"with 12 shares on {ranks} ranks")


# ---- Lesson 3: evaluation (broadcast_buffers, evaluate; 6 seconds; rows 24 to 28)
# The printed loss and accuracy must be those of the saved net in one process with all samples. A
# DistributedSampler would read some samples twice. Instead, the ranks divide the batches. With 26
# samples and batches of 6 on two ranks, there are 6, 6, 6, 6 and 2: rank 0 gets three of them, and
# rank 1 two. With batches of 9 on four ranks, there are 9, 9 and 8, and rank 3 gets none. So a
# collective in the loop would fail or hang. Each rank adds up its losses and its labels, and one
# all-reduce after the loop adds up these sums.
#
# BatchNorm evaluates with running means and variances, which are buffers. In training each rank
# moves them towards those of its own samples. So a step ends with rank 0's for all ranks.
#
# To break it, leave out `broadcast_buffers(net)` in train_step(). Let the batches have 6 samples.
# How many of the 26 samples for validation are then evaluated with buffers other than the saved
# ones, on one rank, and how many on two ranks? So on how many ranks does the lesson fail first? The
# message begins with "AssertionError: Scalars are not close!", and its last line names that number.
#
# Then undo this, and indent `dist.all_reduce(sums)` in evaluate(), so that it is in the loop. In
# which round does a rank then wait for the other in vain, on two ranks with 12 samples a step? The
# message says that the connection was closed or reset, because the other rank has ended.
def net_with_state():
    """Return a net with batch statistics, with buffers of its own, and with random numbers."""
    # spectral_norm() divides the weight by its norm, which it estimates in buffers.
    conv = nn.utils.parametrizations.spectral_norm(nn.Conv1d(3, 3, 3, padding=1))
    norm = nn.BatchNorm1d(3, momentum=0.9)  # The buffers follow the last batches closely.
    layers = [norm, conv, nn.ReLU(inplace=True), plain_net()]
    return nn.Sequential(*layers, nn.BatchNorm1d(3), nn.Dropout(0.1))


def loss_and_accuracy(net, items):
    """Return the mean loss and the accuracy over all labels of these items."""
    x, y = default_collate(items)
    logits = net.eval()(x)
    accuracy = (logits.argmax(dim=1) == y).sum() / (y != -100).sum()
    return [F.cross_entropy(logits, y).item(), accuracy.item()]


class Lesson3Evaluation(TestCase):
    def test_loss_and_accuracy_are_those_of_one_process_with_the_saved_net(self):
        train_set, net = Ragged(36, 40, seed=0), net_with_state()
        for ranks, batch_size in product((1, 2, 3, 4), (12, 36)):
            options = f"--epochs 1 --shares {ranks} --global-batch-size {batch_size}"
            net.load_state_dict(saved_net(ranks, options, net_with_state, train_set))

            printed = re.findall(r"val_\w+ (\S+)", Path("rank0").read_text())

            val_items = ddp.SeededItems(Ragged(26, 40, seed=1), seed=6)  # as train() makes them
            expected = loss_and_accuracy(net, [val_items[0, index] for index in range(26)])
            for number, wanted in zip(printed, expected, strict=True):
                assert_close(float(number), wanted, f"on {ranks} ranks, {batch_size=}", 1e-4)


# ---- Lesson 4: shares (collate_shares, train_step's loop; 4 seconds; rows 14 to 16)
# Many nets look at several samples at once: of the values 1 and 5, BatchNorm makes -1 and 1, but
# -1.4 and 1.4 if 3 and 3 are with them. Many draw random numbers, as dropout does. So what is
# computed together, and what it draws, must not depend on the number of ranks: a step always has,
# say, 4 shares. On 4 ranks each rank computes one of them, as with DDP alone. On 2 ranks, rank 0
# computes the shares 2 and 0, and rank 1 computes 3 and 1. On any number of ranks, share s has the
# samples and random numbers of rank s of 4, and begins with the buffers of the step before.
#
# On 4 ranks the net must be, bit for bit, that of tutorial_step(), which is right if all shares
# have equally many labels, as here. On 2 ranks and on 1, only rounding differs.
#
# To break it, write `seed_generators(*seeds, dist.get_rank())` in train_step(). On which numbers of
# ranks does the lesson fail, 4, 2 or 1? The message begins with "AssertionError: Tensor-likes are
# not close!".
class Lesson4Shares(TestCase):
    def test_four_shares_on_any_number_of_ranks_train_as_stock_ddp_on_four(self):
        task = (net_with_state, ddp.SyntheticDataset(48, 40, seed=0))
        expected = saved_net(4, "--shares 4", *task, train_step=tutorial_step)
        rounding = 2e-5 if GPUS else 1e-6
        for ranks, tolerance in ((4, 0), (2, rounding), (1, rounding)):
            net = saved_net(ranks, "--shares 4", *task)
            with self.subTest(ranks=ranks):
                assert_close(net, expected, "", tolerance)


# ---- Lesson 5: stops, and other numbers of ranks (train, load_checkpoint; 5 seconds; rows 51, 52)
# A job with augmentation, BatchNorm, dropout, a warm-up, clipping, uneven labels and two learning
# rates must end with the net of plain_loop(), which is one process without DDP. It must do so even
# if 3 ranks begin it, 2 ranks resume it after a kill, and 1 rank after another kill. It does,
# - because a step has the same samples (Lesson 1), gradient (2) and shares (4) on any of them,
# - because an item's random numbers follow from the seed, the epoch and its index, and a share's
#   from the seed, the epoch, the samples read before the step, and the number of the share,
# - because the learning rate follows from the epoch and the samples read,
# - and because the checkpoint holds the epoch, the samples read, the net and the optimizer.
#
# To break it, leave out "optimizer" in the `parts` of train(). What begins anew after the kills:
# the warm-up, the order of the samples, or the momentum? The message begins with "AssertionError:
# Tensor-likes are not close!". To test your answer, write `momentum=0` in make_task_with(), too: if
# it is the momentum, the lesson passes now.
def stop_at(stop_after, args, epochs_done):
    """In place of lr_factor(): warm up, and let rank 0 be killed after so many epochs."""
    if epochs_done >= stop_after and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.float64(min(1, epochs_done + 0.1))  # A checkpoint must not hold this NumPy number.


never_stop = partial(stop_at, np.inf)


def plain_loop(args, device):
    """In place of train(): train without DDP, in one process that computes all shares."""
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = ddp.make_task(args, device)
    initial_lrs = [group["lr"] for group in optimizer.param_groups]
    sampler = TorchSampler(train_set, seed=args.seed)
    steps = BatchSampler(sampler, args.global_batch_size, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, indices in enumerate(steps):
            samples_read = step * args.global_batch_size
            factor = min(1, epoch + samples_read / len(train_set) + 0.1)
            for group, initial_lr in zip(optimizer.param_groups, initial_lrs):
                group["lr"] = initial_lr * factor
            items = []
            for index in indices:
                ddp.seed_generators(args.seed, epoch, index)
                items.append([tensor.to(device) for tensor in train_set[index]])
            num_labels = sum((y != -100).sum() for x, y in items)
            buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
            for share in reversed(range(args.shares)):  # The buffers of share 0 remain.
                net.load_state_dict(buffers, strict=False)
                ddp.seed_generators(args.seed, epoch, samples_read, share)
                x, y = default_collate(items[share :: args.shares])
                (F.cross_entropy(net(x), y, reduction="sum") / num_labels).backward()
            nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    torch.save({"net": net.state_dict()}, args.checkpoint)


class Lesson5Stops(TestCase):
    def test_a_job_that_is_killed_twice_ends_as_a_plain_loop_does(self):
        # An epoch has 3 steps, and 11 samples more.
        task = (net_with_state, Ragged(47, 40, seed=0))
        options = "--shares 6 --clip-grad-norm 0.3 --checkpoint-every 1"
        expected = saved_net(1, options, *task, train=plain_loop)
        # The first kill is in the middle of an epoch, and the second between the two epochs.
        for ranks, stop_after in ((3, 0.5), (2, 1)):
            with self.assertRaises(FAILED):
                saved_net(ranks, options, *task, lr_factor=partial(stop_at, stop_after))

        net = saved_net(1, options, *task, lr_factor=never_stop)

        assert_close(net, expected, "after two kills")
        self.assertIn("epoch 1/2, sample 0/47\n", Path("rank0").read_text())


# ---- Used by all tests: run_job()
def be_rank(rank, world_size, port, options, replacements):
    """Be one rank of a job: run main() as if torchrun had started this process."""
    mp.set_start_method(None, force=True)  # torchrun sets none.
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True  # Otherwise two equal runs may differ in bits.
    # As on several machines, a local rank is not the rank.
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{world_size - 1 - rank}"}
    os.environ |= {"WORLD_SIZE": f"{world_size}", "MASTER_ADDR": "localhost"}
    os.environ |= {"MASTER_PORT": f"{port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # of run_job()
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if world_size > GPUS:  # Ranks share GPUs, which ddp_reference.py allows only with mp.spawn().
        os.environ["NCCL_HOSTID"] = f"{rank}"
    stderr = os.open(f"stderr{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stderr, 2)  # for the stacks of ranks that are ended
    vars(ddp).update(replacements)
    timeout = [] if "main" in replacements else ["--timeout", "60"]
    sys.argv = ["ddp_reference.py", *timeout, *options.split()]
    with open(f"rank{rank}", "w") as out, contextlib.redirect_stdout(out):
        try:
            ddp.main()
        except Exception:
            traceback.print_exc()
            raise
    assert not dist.is_initialized()


def run_job(world_size, options="", **replacements):
    """Run a job on so many ranks, and return what each rank printed.

    replacements: in place of names in ddp_reference.py. They are pickled, so functions must stand
    at the top level of this file.
    """
    # If this job hangs, the tests end. The next job starts the clock anew.
    faulthandler.dump_traceback_later(300, exit=True)
    # The ranks are forked from a process that has done the slow imports.
    mp.set_forkserver_preload(["ddp_reference", "test_ddp_reference", "torch._dynamo"])
    # The port is opened here, because a store that opens its own listens on all networks.
    server = socket.create_server(("localhost", 0))
    store = dist.TCPStore(*server.getsockname(), is_master=True, master_listen_fd=server.detach())
    arguments = (world_size, store.port, options, replacements)
    mp.start_processes(be_rank, arguments, world_size, start_method="forkserver")
    return [Path(f"rank{rank}").read_text() for rank in range(world_size)]


# ---- The sampler, and the command line
class TheSampler(TestCase):
    def test_it_reads_what_pytorchs_sampler_does(self):
        cases = list(product(range(20), range(1, 7), (True, False), (True, False)))
        cases.append((70000, 3, True, False))  # 70000 is more than 16 bits hold.
        for num_samples, replicas, shuffle, drop_last in cases:
            for rank in range(replicas):
                arguments = (range(num_samples), replicas, rank, shuffle, 7, drop_last)
                ours = ddp.DistributedSampler(*arguments)
                expected = list(TorchSampler(*arguments))

                # The texts differ if an index is a NumPy number, not Python's.
                self.assertEqual(str(list(ours)), str(expected), arguments)

    def test_it_refuses_ranks_and_places_that_do_not_exist(self):
        for rank, samples_read in ((2, 0), (-1, 0), (1, 3)):
            with self.assertRaises(ValueError):
                ddp.DistributedSampler(range(8), 2, rank).set_epoch(0, samples_read)


class RefusedCommandLines(TestCase):
    def test_each_is_refused_in_one_line(self):
        for options, reason in (
            ("--nproc-per-node 3 --shares 8", "3 processes do not divide --shares 8"),
            ("--shares 7 --nproc-per-node 7 --global-batch-size 240", "must divide --global-batch"),
            ("--checkpoint-every 1", "--checkpoint-every needs --checkpoint"),
            ("--epochs 0", "argument --epochs: invalid positive value: '0'"),
            ("--seed -1", "--seed and --num-workers must not be negative"),
            ("--num-workers -1", "--seed and --num-workers must not be negative"),
        ):
            self.assert_refused(options, reason)

    def test_a_part_of_torchruns_variables_is_refused(self):
        with mock.patch.dict(os.environ, {"RANK": "0", "LOCAL_RANK": "0"}):
            self.assert_refused("", "there is no WORLD_SIZE")

    def assert_refused(self, options, reason):
        sys.argv = ["ddp_reference.py", *options.split()]
        with (
            mock.patch("sys.stderr", io.StringIO()) as err,
            self.assertRaisesRegex(SystemExit, "^2$", msg=options),
        ):
            ddp.main()
        self.assertRegex(err.getvalue(), f"^.*: error: .*{reason}.*\n$")

    def test_any_number_of_processes_has_defaults_that_start(self):
        for world_size in range(1, 17):
            sys.argv = ["ddp_reference.py", "--nproc-per-node", f"{world_size}"]
            with mock.patch("torch.multiprocessing.spawn") as spawn, mock.patch.dict(os.environ):
                ddp.main()
            _, args, _ = spawn.call_args[0][1]
            self.assertEqual(args.shares % world_size, 0)
            self.assertEqual(args.global_batch_size % args.shares, 0)


# ---- What is refused, and what a fault leaves behind
# To add a test of a job that must fail, write a function that does what goes wrong, such as
# open_full_disk(), and give it to assert_job_fails(), in place of one of ddp_reference.py.
# The small job has four steps an epoch.
SMALL = "--num-samples 48 --length 40 --epochs 2 --global-batch-size 12 --shares 4"
train_step = ddp.train_step  # In a rank, ddp.train_step may be one of the functions below.
load_checkpoint = ddp.load_checkpoint
count_labels = ddp.count_labels
batch_sums = ddp.batch_sums


@cache
def small_checkpoint():
    """Return the content of the checkpoint that a small job saves."""
    run_job(2, f"{SMALL} --checkpoint small")
    return Path("small").read_bytes()


class JobTest(TestCase):
    def setUp(self):
        """Write the checkpoint ck, from which a small job goes on."""
        self.intact = small_checkpoint()
        Path("ck").write_bytes(self.intact)
        self.inode = os.stat("ck").st_ino

    def assert_job_fails(self, error, options="", checkpoint="ck", **replacements):
        """Assert that a job on two ranks ends with this error, and leaves ck as it was."""
        options = f"{SMALL} --epochs 3 --checkpoint {checkpoint} {options}"
        with self.assertRaises(FAILED):
            run_job(2, options, **replacements)
        # The error that is raised may be that of a rank that has lost the other one.
        self.assertRegex(Path("stderr0").read_text() + Path("stderr1").read_text(), error)
        self.assertEqual(Path("ck").read_bytes(), self.intact)
        self.assertEqual(os.stat("ck").st_ino, self.inode)  # It was not even written anew.
        self.assertFalse(os.path.exists("new"))

    def be_the_only_rank(self):
        """Let functions of ddp_reference.py run in this process."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)


def unequal_task(args, device):
    """In place of make_task(): return a data set of another size on each rank."""
    _, *others = make_task_with(plain_net, None, args, device)
    return (ddp.SyntheticDataset(48 + dist.get_rank(), 40, seed=0), *others)


def load_on_rank_0_only(path, settings, parts):
    """In place of load_checkpoint(): do not find the file on other ranks, as on another disk."""
    return load_checkpoint(path if dist.get_rank() == 0 else "elsewhere", settings, parts)


class RunsCode:
    """An object that makes a folder when it is loaded without weights_only=True."""

    def __reduce__(self):
        return os.mkdir, ("made by code",)


class RefusedCheckpoints(JobTest):
    def test_a_checkpoint_of_another_job_is_refused(self):
        for options, setting in (
            ("--seed 9", "{'seed': 0}"),
            ("--shares 2", "{'shares': 4}"),
            ("--global-batch-size 24", "{'global batch size': 12}"),
            ("--num-samples 60", "{'training samples': 48}"),
        ):
            self.assert_job_fails(f"ck is of a job with other settings: it has {setting}", options)
        make_task = partial(make_task_with, plain_net, ddp.SyntheticDataset(48, 40, seed=0))
        for setting in ("'optimizer': 'Adam'", "'validation samples': 125"):
            self.assert_job_fails(f"other settings: it has {{.*{setting}", make_task=make_task)
        self.assert_job_fails("{'metrics': .*'accuracy'", METRICS=["loss", "top1"])
        checkpoint = torch.load("ck", weights_only=True)
        del checkpoint["settings"]["metrics"]
        torch.save(checkpoint, "older")
        self.assert_job_fails("other settings: it has {'metrics': None}", checkpoint="older")

    def test_a_file_that_is_no_checkpoint_is_refused(self):
        Path("half").write_bytes(self.intact[: len(self.intact) // 2])
        torch.save(RunsCode(), "code")
        torch.save({"net": {}}, "foreign")
        os.makedirs("folder", exist_ok=True)  # It exists, but reading it fails, as a disk may do.
        for name in ("half", "code", "folder", "foreign"):
            self.assert_job_fails(f"cannot load {name}", checkpoint=name)
        self.assertFalse(os.path.exists("made by code"))

    def test_ranks_that_do_not_agree_are_refused(self):
        not_found = "unlike rank 0, rank 1 has {'epoch': 0}"
        self.assert_job_fails(not_found, load_checkpoint=load_on_rank_0_only)
        with self.assertRaises(FAILED):
            options = f"{SMALL} --checkpoint middle --checkpoint-every 1"
            run_job(2, options, lr_factor=partial(stop_at, 0.3))
        not_found = "unlike rank 0, rank 1 has {'samples read': 0}"
        self.assert_job_fails(not_found, checkpoint="middle", load_checkpoint=load_on_rank_0_only)
        unequal = "unlike rank 0, rank 1 has {'training samples': 49}"
        self.assert_job_fails(unequal, checkpoint="new", make_task=unequal_task)


def open_full_disk(path, mode):
    """In place of open(): begin to write the file, and then find the disk full."""
    with open(path, mode) as file:
        file.write(b"half")
    raise OSError("No space left on device")


class Saving(JobTest):
    def test_a_full_disk_leaves_the_old_checkpoint(self):
        self.assert_job_fails("No space left on device", open=open_full_disk)
        self.assertNotIn("No space left", Path("stderr1").read_text())  # Only rank 0 writes.

    def test_a_file_has_reached_the_disk_before_it_replaces_the_old_one(self):
        self.be_the_only_rank()
        synced = []
        with mock.patch("os.fsync", lambda file: synced.append(os.path.getsize(file.name))):
            ddp.save_checkpoint("ck", {}, {"net": plain_net()}, 0, 0, torch.zeros(3))
        self.assertEqual(synced, [os.path.getsize("ck")])

    def test_until_the_new_file_replaces_it_the_old_one_is_there(self):
        self.be_the_only_rank()
        with mock.patch("os.replace", side_effect=OSError), self.assertRaises(OSError):
            ddp.save_checkpoint("ck", {}, {"net": plain_net()}, 0, 0, torch.zeros(3))
        self.assertEqual(Path("ck").read_bytes(), self.intact)

    def test_a_folder_that_does_not_exist_ends_the_job_at_its_start(self):
        error = "No such file or directory: 'nowhere/ck"
        self.assert_job_fails(error, checkpoint="nowhere/ck", train_step=None)

    def test_a_net_that_has_diverged_is_not_saved(self):
        # After the first step, parameters are infinite, and after the epoch they are nan.
        self.assert_job_fails("infinite, so ck was not written", "--lr inf --checkpoint-every 1")
        self.assert_job_fails("0.weight is nan, or differs", "--lr inf")

    def test_a_single_nan_anywhere_in_the_net_is_found(self):
        self.be_the_only_rank()
        for name, value in (
            ("0.weight", torch.inf),
            ("1.bias", torch.nan),
            ("1.running_var", torch.nan),
        ):
            net = nn.Sequential(nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2))
            net.state_dict()[name].view(-1)[-1] = value
            with self.assertRaisesRegex(FloatingPointError, f"{name} is nan or infinite"):
                ddp.save_checkpoint("new", {}, {"net": net}, 0, 0, torch.zeros(3))


def drifting_step(name, model, *arguments):
    """In place of train_step(): change a parameter on rank 1, as if it was not averaged."""
    model.module.get_parameter(name).data += 0.0001 * dist.get_rank()
    return train_step(model, *arguments)


SyntheticDataset = ddp.SyntheticDataset


class Ending(SyntheticDataset):
    """Its 40th sample raises StopIteration, as an exhausted reader does."""

    def __getitem__(self, index):
        if index == 40:
            raise StopIteration
        return super().__getitem__(index)


def ending_validation(num_samples, length, seed):
    """In place of SyntheticDataset: the samples for validation, which have seed 1, end early."""
    return (Ending if seed == 1 else SyntheticDataset)(num_samples, length, seed)


def crash(args, device):
    """In place of make_task(): crash as C code may do."""
    os.kill(os.getpid(), signal.SIGSEGV)


class OtherFaults(JobTest):
    def test_nets_that_drift_apart_end_the_job(self):
        make_task = partial(make_task_with, plain_net, ddp.SyntheticDataset(48, 40, seed=0))
        for name in ("0.weight", "2.bias"):  # the first parameter and the last
            step = partial(drifting_step, name)
            with self.assertRaises(FAILED):
                run_job(2, SMALL, make_task=make_task, train_step=step)
            # The first error to be reported may be rank 0's, which has lost rank 1.
            reason = f"{name} is nan, or differs from rank 0's because its gradients are"
            self.assertIn(reason, Path("stderr1").read_text())

    def test_an_item_that_raises_stop_iteration_does_not_end_the_epoch(self):
        make_task = partial(make_task_with, plain_net, Ending(48, 40, seed=0))
        with self.assertRaisesRegex(FAILED, "StopIteration"):
            run_job(1, SMALL, make_task=make_task)
        with self.assertRaisesRegex(FAILED, "StopIteration"):
            run_job(1, SMALL, SyntheticDataset=ending_validation)

    def test_a_batch_larger_than_the_data_is_refused(self):
        self.assert_job_fails("--global-batch-size is larger than the 6 samples", "--num-samples 6")

    def test_a_crash_in_c_code_prints_the_stack(self):
        with self.assertRaisesRegex(FAILED, "SIGSEGV"):
            run_job(1, SMALL, make_task=crash)
        self.assertIn("in crash\n", Path("stderr0").read_text())


# ---- What does not depend on the number of ranks: unusual nets and data
def clamp(gradient):
    """A hook on gradients."""
    return gradient.clamp(-0.001, 0.001)


def clamped_net():
    """Return a net with a hook on a gradient."""
    net = plain_net()
    net[0].weight.register_hook(clamp)
    return net


class RarelyUsedHead(nn.Module):
    """A net whose second head takes part only if a batch has a sample that begins with x > 1.5."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Conv1d(3, 3, 3, padding=1), nn.Conv1d(3, 3, 1)])

    def forward(self, x):
        logits = self.heads[0](x)
        if x[:, 0, 0].max() > 1.5:
            logits = logits + self.heads[1](x)
        return logits


class NoisyNet(nn.Conv1d):
    """A net that draws random numbers in evaluation, too."""

    def __init__(self):
        super().__init__(3, 3, 3, padding=1)

    def forward(self, x):
        return super().forward(x + torch.rand(len(x), 1, 1, device=x.device))


def step_after_another_nets(model, *arguments):
    """In place of train_step(): begin with gradients, which another net's step has left."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return train_step(model, *arguments)


def task_that_draws(args, device):
    """In place of make_task(): print random numbers, which a random split would use."""
    print(f"drawn: {torch.rand(())} {np.random.rand()} {random.random()}")
    return make_task_with(plain_net, ddp.SyntheticDataset(48, 40, seed=0), args, device)


class UnusualJobs(TestCase):
    def assert_ranks_do_not_matter(self, make_net, workers=0, **replacements):
        """Run a job on 1 rank, with workers, and on 2 and 4, and compare what they print."""
        printed = []
        for ranks in (1, 2, 4):
            options = f"{SMALL} --lr 0.1 --num-workers {workers if ranks == 1 else 0}"
            make_task = partial(make_task_with, make_net, Ragged(48, 40, seed=0))
            out = run_job(ranks, options, make_task=make_task, **replacements)
            printed.append([float(number) for number in re.findall(r"loss (\S+)", out[0])])
        self.assertEqual(len(printed[0]), 6)  # Each epoch has a line for four steps, and another.
        assert_close(printed[1], printed[0], "on 2 ranks", 1e-4)
        assert_close(printed[2], printed[0], "on 4 ranks", 1e-4)

    def test_hooks_on_gradients_do_not_see_the_number_of_ranks(self):
        self.assert_ranks_do_not_matter(clamped_net)

    def test_a_head_that_some_steps_do_not_use_trains_as_in_stock_ddp(self):
        task = (RarelyUsedHead, ddp.SyntheticDataset(48, 40, seed=0))
        wrap = partial(ddp.DistributedDataParallel, find_unused_parameters=True)
        replacements = {"DistributedDataParallel": wrap, "train_step": tutorial_step}
        expected = saved_net(4, "--shares 4", *task, **replacements)
        del replacements["train_step"]
        for ranks in (1, 2, 4):
            net = saved_net(ranks, "--shares 4", *task, **replacements)
            assert_close(net, expected, f"on {ranks} ranks")

    def test_random_numbers_in_evaluation_and_in_workers_do_not_depend_on_ranks(self):
        self.assert_ranks_do_not_matter(NoisyNet, workers=1)

    def test_gradients_that_another_net_has_left_do_not_count(self):
        self.assert_ranks_do_not_matter(plain_net, train_step=step_after_another_nets)

    def test_all_ranks_draw_the_same_random_numbers_in_make_task(self):
        drawn = set()
        for ranks in (1, 2):
            for out in run_job(ranks, SMALL, make_task=task_that_draws):
                drawn.add(re.search("drawn: .*", out)[0])
        self.assertEqual(len(drawn), 1)

    def test_all_places_and_generators_draw_their_own_numbers(self):
        drawn = set()
        for place in product(range(3), repeat=3):
            ddp.seed_generators(*place)
            drawn |= {random.random(), np.random.randint(2**16), torch.randint(2**16, ()).item()}
        self.assertEqual(len(drawn), 3 * 27)


class AllIgnored(ddp.SyntheticDataset):
    """Signals without any labels."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, torch.full_like(y, -100)


def masked_sums(model, batch, amp):
    """In place of batch_sums(): multiply losses by 0 where labels are ignored."""
    x, y = (tensor.to(next(model.parameters()).device) for tensor in batch)
    losses = F.cross_entropy(model(x), y.clamp(min=0), reduction="none") * (y != -100)
    return torch.stack([losses.double().sum(), losses.double().sum()])


def light_labels(batch):
    """In place of count_labels(): weigh each label by 0.0001."""
    return 0.0001 * count_labels(batch)


def light_sums(*arguments):
    """In place of batch_sums(): weigh each label by 0.0001."""
    return 0.0001 * batch_sums(*arguments)


class StrangeState(nn.Conv1d):
    """A net whose state has a text, an infinite buffer, and a frozen and transposed parameter."""

    def __init__(self):
        super().__init__(3, 3, 1)
        self.register_buffer("mask", torch.full((3, 1), -torch.inf))
        self.frozen = nn.Parameter(torch.ones(3, 2).T, requires_grad=False)

    def get_extra_state(self):
        return "a text"

    def set_extra_state(self, state):
        assert state == "a text"


class UnusualStates(TestCase):
    def test_samples_without_any_labels_leave_the_net_unharmed(self):
        train_set = AllIgnored(12, 40, seed=0)
        net = saved_net(2, "--shares 2", plain_net, train_set, batch_sums=masked_sums)
        self.assertTrue(all(value.isfinite().all() for value in net.values()))

    def test_labels_may_have_weights_that_add_up_to_less_than_1(self):
        task = (plain_net, Ragged(12, 40, seed=0))
        expected = saved_net(1, "--shares 2", *task)
        net = saved_net(1, "--shares 2", *task, count_labels=light_labels, batch_sums=light_sums)
        assert_close(net, expected, "")

    def test_a_net_with_strange_state_is_saved_and_resumed(self):
        make_task = partial(make_task_with, StrangeState, ddp.SyntheticDataset(48, 40, seed=0))
        for epochs in (1, 2):
            options = f"{SMALL} --epochs {epochs} --checkpoint strange"
            out, _ = run_job(2, options, make_task=make_task)
            self.assertIn(f"strange: epoch {epochs - 1}/{epochs}", out)


# ---- How a job runs: loader workers, precision, collectives
def loader_that_tells(dataset, num_workers, persistent_workers, **options):
    """In place of DataLoader: print the options for workers, and make a loader that has none."""
    context = options.pop("multiprocessing_context")
    print(f"{context=} {persistent_workers=} {num_workers=}")
    return DataLoader(dataset, **options)


class PrintsHowItIsCalled(nn.Conv1d):
    """A net whose logits are 0, so the loss of three equally likely classes is log(3) = 1.0986."""

    def __init__(self):
        super().__init__(3, 3, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x):
        logits = super().forward(x)
        print(f"training={self.training} gradients={logits.requires_grad} {logits.dtype}")
        return logits


def profiled_step(*arguments):
    """In place of train_step(): print how many collectives it calls, and how often it waits."""
    with torch.profiler.profile() as profile:
        sums = train_step(*arguments)
    names = [event.name for event in profile.events()]
    collectives = sum("c10d::" in name for name in names)
    waits = sum(name in ("aten::item", "cudaStreamSynchronize") for name in names)
    print(f"{collectives} collectives, {waits} waits")
    return sums


class HowAJobRuns(TestCase):
    def test_num_workers_counts_the_workers_of_a_rank_and_at_most_two_for_validation(self):
        (out,) = run_job(1, f"{SMALL} --num-workers 3", DataLoader=loader_that_tells)

        self.assertIn("context='spawn' persistent_workers=True num_workers=3\n", out)
        self.assertIn("context='spawn' persistent_workers=True num_workers=2\n", out)

    def test_amp_computes_in_bfloat16_but_the_loss_in_float32(self):
        data = ddp.SyntheticDataset(48, 40, seed=0)
        make_task = partial(make_task_with, PrintsHowItIsCalled, data)
        for options, dtype in (("", "torch.float32"), ("--amp", "torch.bfloat16")):
            (out,) = run_job(1, f"{SMALL} --lr 0 {options}", make_task=make_task)
            training, evaluation = (
                f"training=True gradients=True {dtype}",
                f"training=False gradients=False {dtype}",
            )
            self.assertEqual(set(re.findall("training=.*", out)), {training, evaluation})
            self.assertEqual(set(re.findall(r"loss (\S+)", out)), {"1.0986"})

    def test_a_step_calls_five_collectives_and_never_waits(self):
        """They are for the number of labels, gradients, two dtypes of buffers, and the sums."""
        make_task = partial(make_task_with, net_with_state, Ragged(48, 40, seed=0))
        options = f"{SMALL} --clip-grad-norm 1"
        (out,) = run_job(1, options, make_task=make_task, train_step=profiled_step)
        steps = re.findall(".* waits", out)
        self.assertEqual(len(steps), 8)
        # The first two steps also set up DDP.
        self.assertEqual(set(steps[2:]), {"5 collectives, 0 waits"})


# ---- What is printed
class PrintedNumbers(TestCase):
    def test_all_are_those_of_the_job_over_a_stop(self):
        # With a learning rate of 0, the net stays what it is.
        torch.manual_seed(0)
        train_set = ddp.SeededItems(Ragged(48, 40, seed=0), seed=0)
        val_set = ddp.SeededItems(Ragged(26, 40, seed=1), seed=1)
        make_task = partial(make_task_with, plain_net, train_set.dataset)
        clock = SimpleNamespace(perf_counter=iter(range(50, 99, 2)).__next__)  # 2 seconds a look
        run = partial(run_job, 3, make_task=make_task, time=clock)
        options = f"{SMALL} --shares 3 --log-every 4 --checkpoint printed --checkpoint-every 2"
        # The first job has another learning rate, which must not come back, and ends before its
        # first step, the second after two steps, the third before one, the fourth after an epoch.
        for lr, stop_after in (("1", 0), ("0", 0.7), ("0", 0), ("0", 1)):
            with self.assertRaises(FAILED):
                run(f"{options} --lr {lr}", lr_factor=partial(stop_at, stop_after))
        fourth = Path("rank0").read_text()

        last, *others = run(f"{options} --lr 0")

        net = plain_net()
        net.load_state_dict(torch.load("printed", map_location="cpu")["net"])
        val_loss, val_accuracy = loss_and_accuracy(net, [val_set[0, i] for i in range(26)])
        for epoch, printed, sample, speed in ((0, fourth, 24, 12.0), (1, last, 0, 24.0)):
            loss, accuracy = loss_and_accuracy(net, [train_set[epoch, i] for i in range(48)])
            train = f"loss {loss:#.5g} accuracy {accuracy:#.5g}"
            val = f"val_loss {val_loss:#.5g} val_accuracy {val_accuracy:#.5g}"
            expected = f"printed: epoch {epoch}/2, sample {sample}/48\n"
            expected += f"epoch {epoch} | 48/48 | {train}\n"
            expected += f"epoch {epoch} | {train} | {val} | {speed} samples/s\n"
            assert_same_lines(printed.partition("\n")[2], expected)
        self.assertEqual(others, ["", ""])  # Only rank 0 prints.


# ---- The README: what it shows is run
def edited(text, old, new):
    """Return a program in which a text, which stands there once, is replaced."""
    assert text.count(old) == 1, f"an edit or a diff of README.md does not fit, here: {old}"
    return text.replace(old, new)


def old_side(diff):
    """Return the lines that a diff keeps or removes."""
    return "".join(re.findall(r"(?m)^[ -](.*\n)", diff))


def patched(text, diff):
    """Return a program to which a diff is applied."""
    for hunk in re.split(r"(?m)^@@.*\n", diff):
        if hunk:
            new_side = "".join(re.findall(r"(?m)^[ +](.*\n)", hunk))
            text = edited(text, old_side(hunk), new_side)
    return text


def readme_programs():
    """Return the README's programs, which its diffs make, as {name: text}."""
    programs = {"ddp_reference.py": SOURCE}
    diffs = re.findall(r"(?ms)^```diff (\S+) (\S+)\n(.*?)^```", README.read_text())
    for old_name, name, diff in diffs:
        if old_name == "one.py":  # The first diff shows it whole.
            programs.setdefault(old_name, old_side(diff))
        programs[name] = patched(programs[old_name], diff)
    del programs["ddp_reference.py"]
    return programs


def on_cpu(program):
    """Return a program that uses no GPU."""
    return program.replace("torch.cuda.is_available()", "False")


def printed_by(program, world_size, options=""):
    """Return what rank 0 of a program, a text, prints."""
    if world_size > GPUS:  # Programs that do not descend from ddp_reference.py need a GPU a rank.
        program = on_cpu(program)
    Path("program.py").write_text(program)
    run_program = partial(runpy.run_path, "program.py", run_name="__main__")
    return run_job(world_size, options, main=run_program)[0]


class TheReadme(TestCase):
    def test_the_sampler_reads_what_the_experiments_show(self):
        """It also warns where an order is read twice, as in experiment 2, and nowhere else."""
        rows = re.findall(r"(?m)^\| (\d\. .*?) \| (.*?) \| (.*?) \|", README.read_text())
        self.assertEqual(len(rows), 9)
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
            one_order = "no sampler" not in setting and "set_epoch" not in setting
            self.assertEqual(warn.called, one_order, setting)

    def test_1000_samples_make_the_batches_that_it_tells(self):
        sampler = ddp.DistributedSampler(range(1000), num_replicas=2, rank=1)
        sizes = [len(batch) for batch in DataLoader(range(1000), 32, sampler=sampler)]
        text = f"each rank has {sum(sizes)} samples: {len(sizes)} batches, the last of {sizes[-1]}"
        self.assertIn(f"{text}, or {sizes.count(32)} with", README.read_text())

    def test_its_programs_print_the_same_on_one_process_and_on_two_and_after_a_stop(self):
        programs = readme_programs()
        one = printed_by(programs["one.py"], 1)
        self.assertTrue(f"ends at {one.split(' | ')[-1].strip()}\n" in README.read_text(), one)
        for name in ("many.py", "accumulate.py", "dp.py"):
            self.assertEqual(printed_by(programs[name], 2), one, name)
        first_epoch = edited(
            programs["resume.py"], "range(first_epoch, 3)", "range(first_epoch, 1)"
        )
        resumed = printed_by(first_epoch, 2) + printed_by(programs["resume.py"], 2)
        self.assertEqual(resumed, one)

    def test_its_gpt_learns_and_prints_the_same_on_one_process_and_on_two(self):
        gpt, numbers = readme_programs()["gpt.py"], []
        for ranks in (1, 2):
            options = "--epochs 2 --num-samples 96 --global-batch-size 24 --shares 4 --lr 0.003"
            out = printed_by(gpt, ranks, options)
            losses = re.findall(r"\| loss (\S+).*val_loss (\S+)", out)
            numbers.append(torch.tensor([float(number) for pair in losses for number in pair]))
        assert_close(numbers[1], numbers[0], "", 0.001)
        self.assertLess(numbers[0][-1], numbers[0][1])

    def test_shards_train_as_their_samples_do_or_are_refused(self):
        shards = readme_programs()["shards.py"]
        options = f"{SMALL} --shards a.tar --val-shards a.tar"
        path = Path("a.tar")
        with tarfile.open(path, "w") as tar:
            for index, sample in enumerate(ddp.SyntheticDataset(48, 40, seed=0)):
                for name, array in zip(("x.npy", "y.npy"), sample):
                    np.save(name, array)
                    tar.add(name, f"{index}.{name}")
        means = r"\| loss \S+ accuracy \S+"
        printed = re.findall(means, printed_by(shards, 2, options))
        expected = re.findall(means, run_job(2, SMALL)[0])
        assert_same_lines("\n".join(printed), "\n".join(expected))

        intact = path.read_bytes()
        cut_off = intact[: 15 * 5120]
        link = tarfile.TarInfo("48.x.npy")
        link.type = tarfile.SYMTYPE
        only_zeros = bytes(10240)
        twice = intact[:5120] + intact
        damaged = (cut_off, cut_off + b"?" * 2000, link.tobuf() + intact, only_zeros, twice)
        for content in damaged:
            path.write_bytes(content)
            with self.assertRaisesRegex(FAILED, "a.tar is damaged"):
                printed_by(shards, 1, options)

    def test_each_part_can_be_copied_into_an_empty_module(self):
        """The README's table names the definitions of each part. Here each part is used."""
        uses = {
            "sampler": """
                sampler = DistributedSampler(range(8), num_replicas=2, rank=1)
                sampler.set_epoch(1, samples_read=4)
                assert len(list(sampler)) == 2""",
            "step": """
                net = nn.Conv1d(3, 3, 1)
                model = DistributedDataParallel(net)
                model.broadcast_buffers = False
                batch = torch.randn(2, 3, 5), torch.ones(2, 5, dtype=torch.int64)
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                sums = train_step(model, optimizer, {0: batch}, (0, 1, 2))
                assert sums[0] == 10
                assert batch_sums(model, batch, amp=False).dtype == torch.float64""",
            "evaluation": """
                net = nn.Conv1d(3, 3, 1)
                batch = torch.randn(2, 3, 5), torch.ones(2, 5, dtype=torch.int64)
                sums = evaluate(net, [batch, batch], seed=0)
                assert sums[0] == 20""",
            "random items": """
                class Noise(Dataset):
                    def __len__(self):
                        return 5
                    def __getitem__(self, index):
                        return torch.rand(())
                items = SeededItems(Noise(), seed=0)
                assert len(items) == 5
                assert items[1, 2] == items[1, 2] != items[2, 2]""",
            "checkpoints": """
                parts = {"net": nn.Conv1d(3, 3, 1)}
                save_checkpoint("part", {"seed": 0}, parts, 1, 8, torch.zeros(3))
                assert load_checkpoint("part", {"seed": 0}, parts)[:2] == (1, 8)""",
        }
        rows = re.findall(r"(?m)^\| ([a-z ]+) \| (`\w+`(?:, `\w+`)*) \|", README.read_text())
        self.assertEqual([name for name, _ in rows], list(uses))
        imports = SOURCE.split('"""\n', 1)[1].split("# ---- 1.")[0]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        for name, definitions in rows:
            module = imports
            for definition in re.findall(r"\w+", definitions):
                pattern = rf"(?m)^(?:@.*\n)?(?:(?:def|class) {definition}\b|{definition} = )"
                start = re.search(pattern, SOURCE).start()
                module += SOURCE[start:].split("\n\n\n")[0] + "\n\n\n"
            with self.subTest(name):
                exec(module + textwrap.dedent(uses[name]), {"__name__": "part"})


# ---- The processes
def program(body):
    """Return a program that replaces functions of ddp_reference.py, and runs its main()."""
    imports = (
        "import os, signal, time\nimport torch.distributed as dist\nimport ddp_reference as ddp\n"
    )
    return f'{imports}{body}\nif __name__ == "__main__":\n    ddp.main()\n'


PRINT_DEVICE = """
print(f"cores: {ddp.torch.get_num_threads()}")


def train(args, device):
    loopback = os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    threads = int(os.environ["OMP_NUM_THREADS"])
    hostid = os.environ.get("NCCL_HOSTID")
    print(f"rank {dist.get_rank()} on {device}, {loopback=}, {threads=}, {hostid=}")
    dist.barrier()  # Without it, one rank may leave before the other has come.


ddp.train = train
"""
# Rank 0 hangs in the second epoch, but not if torchrun has started the job again.
HANG = """
if ddp.torch.cuda.device_count() == 1:  # NCCL refuses two ranks on one GPU, but not with this.
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]


def lr_factor(args, epochs_done):
    if epochs_done > 1.3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["RANK"] == "0":
        signal.pause()
    return 1.0


ddp.lr_factor = lr_factor
"""
# All ranks hang in their second step, when their loader workers read.
STUCK = """
def lr_factor(args, epochs_done):
    if epochs_done > 0:
        print("stuck")
        time.sleep(100)
    return 1.0


ddp.lr_factor = lr_factor
"""
# The slow programs run beside the tests: {name: (command, program)}.
RUN_SH = ["bash", "run"]  # a symbolic link to run.sh
# In place of Python: it tells how it is called, and what it lacks until pip has installed that.
PYTHON_WITHOUT_TORCH = """#!/bin/sh
echo "$@" >> called
bin=$(dirname "$0")
case "$*" in
    -) test -e "$bin/torch" || echo PyTorch ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/" ;;
    "-m pip"*) touch "$bin/torch" ;;
esac
"""
SHIPPED_RANKS = max(ranks for ranks in (1, 2, 4, 8) if ranks <= (GPUS or 2))
ALONE = f"{SMALL} --nproc-per-node 1".split()
TWICE = ["--nproc-per-node=2", "--max-restarts=1"]
SECONDS = 30 if GPUS else 12  # for a GPU to start, and until the rank that hangs is given up
RESTART = f"{SMALL} --timeout {SECONDS} --checkpoint hanging --checkpoint-every 1".split()
SLOW_PROGRAMS = {
    "shipped.py": ([*RUN_SH, "--nproc-per-node", str(SHIPPED_RANKS)], ""),
    "devices.py": ([*RUN_SH, "devices.py", "--nproc-per-node", "2"], program(PRINT_DEVICE)),
    "hanging.py": ([sys.executable, *TORCHRUN, *TWICE, "hanging.py", *RESTART], program(HANG)),
    "killed.py": ([sys.executable, "killed.py", *ALONE, "--num-workers", "1"], program(STUCK)),
    "interrupted.py": ([sys.executable, "interrupted.py", *ALONE], program(STUCK)),
}


@cache
def start(name):
    """Start a slow program in a session of its own, as from a terminal."""
    command, text = SLOW_PROGRAMS[name]
    Path(name).write_text(text)
    if not os.path.exists("run"):
        os.symlink(HERE / "run.sh", "run")
    environment = {**os.environ, "PYTHON": sys.executable}
    options = {"start_new_session": True, "stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE}
    process = Popen(command, text=True, env=environment, **options)
    atexit.register(end_session, process)  # if no test has ended it
    return process


def wait_for(name):
    """Return a slow program's (status, stdout, stderr) when all of its processes have ended."""
    out, err = start(name).communicate(timeout=300)
    return start(name).returncode, out, err


class TheProcesses(TestCase):
    def test_the_first_command_prints_what_the_readme_shows(self):
        status, out, err = wait_for("shipped.py")

        self.assertEqual(status, 0, err)
        backend = "nccl" if GPUS else "gloo"
        shares = f"8 shares ({8 // SHIPPED_RANKS} a rank)"
        batch = f"world size {SHIPPED_RANKS}, global batch size 240 in {shares}, torch "
        self.assertIn(f"ddp on {backend}, {batch}", out)
        numbers = []
        for text in (out, README.read_text()):
            last_line = re.search(r"(?m)^epoch 5 \| loss .* \| ", text)[0]
            numbers.append(torch.tensor([number for _, number, *_ in read_numbers(last_line)]))
        assert_close(*numbers, "not the README's", 0.002 if GPUS else 0.0002)

    def test_run_sh_installs_what_is_missing_once(self):
        os.makedirs("install")
        shutil.copy(HERE / "run.sh", "install")
        Path("install/python").write_text(PYTHON_WITHOUT_TORCH)
        os.chmod("install/python", 0o755)
        run = ["bash", "install/run.sh", "my_job.py", "--lr", "1"]
        variables = {**os.environ, "PYTHON": f"{os.getcwd()}/install/python"}
        for torch_to_install, called in (
            (None, ["-", "-m venv .venv", "-m pip install torch==2.13.0 numpy", "-"]),
            (None, ["-", "-"]),
            ("torch==2.9.1", ["-m venv .venv", "-m pip install torch==2.9.1 numpy", "-"]),
        ):
            if torch_to_install:
                variables["TORCH"] = torch_to_install
            Path("called").write_text("")
            subprocess.run(run, env=variables, stderr=DEVNULL, check=True)
            calls = Path("called").read_text().replace(f"{os.getcwd()}/install/", "").splitlines()
            self.assertEqual(calls, [*called, "my_job.py --lr 1"])

        os.remove("install/.venv/bin/torch")  # as if the installation was killed
        del variables["TORCH"]
        failed = subprocess.run(run, env=variables, stderr=PIPE, text=True)
        self.assertEqual(failed.returncode, 1)
        self.assertRegex(failed.stderr, r"^run.sh: .*/.venv lacks PyTorch. Delete .*\n$")

    def test_each_rank_has_its_own_device_and_part_of_the_cores(self):
        status, out, err = wait_for("devices.py")

        self.assertEqual(status, 0, err)
        # The launcher has all cores, and prints them first.
        threads = max(1, int(re.search(r"cores: (\d+)", out)[1]) // 2)
        for rank in range(2):
            device = f"cuda:{rank % GPUS}" if GPUS else "cpu"
            hostid = f"'{rank}'" if GPUS == 1 else None
            self.assertIn(f"rank {rank} on {device}, loopback=True, {threads=}, {hostid=!s}\n", out)

    @unittest.skipUnless(GPUS, "there is no GPU")
    def test_under_torchrun_the_local_rank_chooses_the_gpu(self):
        for rank, out in enumerate(run_job(2, train=add_up_integers)):
            self.assertIn(f"on cuda:{(1 - rank) % GPUS}:", out)  # as run_job() numbers local ranks

    def test_a_rank_that_hangs_prints_its_stack_and_torchrun_restarts(self):
        status, out, err = wait_for("hanging.py")

        self.assertEqual(status, 0, err)
        self.assertRegex(err, r'hanging.py", line \d+ in lr_factor\n')  # the rank that hangs
        self.assertRegex(err, "Timed out|timeout|Timeout")  # the rank that waits for it
        self.assertIn("hanging: epoch 1/2, sample 24/48\n", out)

    def test_no_process_is_left_when_the_launcher_is_killed(self):
        process = start("killed.py")
        self.assertIn("stuck\n", process.stdout)  # This reads until it comes.

        process.kill()

        process.communicate(timeout=60)  # until all processes that can write have ended

    def test_ctrl_c_ends_all_processes(self):
        process = start("interrupted.py")
        self.assertIn("stuck\n", process.stdout)  # This reads until it comes.

        process.send_signal(signal.SIGINT)  # to the launcher alone

        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130)
        self.assertNotIn("KeyboardInterrupt", err)  # A rank ends at once, without a traceback.


# ---- bash run.sh check
# A number is a result if it has a decimal point or an exponent, or is followed by a letter or %.
NUMBER = re.compile(
    r"""
    (?<![\d.]) [-+]?             # not in the middle of another number
    (?: \d* \. \d+               # 0.5 or .5
      | \d+ \. (?!\d)            # 5.
      | \d+ \.? (?= e[-+]?\d )   # 1e-3, whose exponent follows
      | \d+ (?= [a-z%] )          # 97% or 30dB
    )
    (?: e [-+]? \d+ )? (?! \.?\d )
    | [-+]? \b (?: inf | nan ) \b (?! \.?\d )
    """,
    re.VERBOSE | re.IGNORECASE,
)
UNIT = r"(?:[mun]?s|secs?|seconds?|minutes?|h|hours?|[kKMGT]i?B|\w+/s(?:ec)?)"
NO_RESULTS = [
    r"\x1b\[[\d;]*m",  # a colour
    r"(?<![\w@.])\d+:[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?![\d.])",  # the time: 0:01 or 0:00:01.5
    r"\w+/[sS](?:ec)?[\"':= ]+[\d.]+",  # a speed behind its unit: "samples/sec: 2.5"
    rf"(?<![\w.])[-+\d.e]+ ?{UNIT}(?:/\w+)?(?![\w/])",  # a time, size or speed: 3.5ms, 7.5s/it
    r"\d+\.\d+\.\d[\w.+]*",  # a version: 2.13.0
]
OPTION = r"""["'](--[\w-]+)["']"""


def read_numbers(printed, ignore="$^"):
    """Return (kind, number, step, text) for each result that a job has printed.

    The text is the line up to the number ("epoch 0 | loss 0.5"), the kind is that without numbers
    ("epoch  | loss #"), and the step is one unit of its last decimal (0.1).
    """
    numbers = []
    for line in printed.splitlines():
        line = re.sub("|".join(NO_RESULTS), "", line)
        line = re.sub(ignore, "", line)
        end = 0
        kind = ""
        for match in NUMBER.finditer(line):
            kind += re.sub(r"\d", "", line[end : match.start()]) + "#"
            end = match.end()
            digits, _, exponent = match[0].lower().partition("e")
            step = float(f"1e{int(exponent or 0) - len(digits.partition('.')[2])}")
            numbers.append((kind, float(match[0]), step, line[:end]))
    return numbers


def compare(name, numbers, expected, tolerance):
    """Print how far a run is from one process: return [(kind, expected kind, note)] of differences.

    A difference is relative to the number of one process, or to a hundredth of the largest number
    of its kind, if that is more. One unit of the last decimal may come from rounding.
    """
    largest = {}
    for kind, number, *_ in expected:
        if np.isfinite(number):
            largest[kind] = max(abs(number), largest.get(kind, 0))
    apart, differing = 0, []
    nothing = ("", np.nan, 0, "nothing")
    for actual, wanted in zip_longest(numbers, expected, fillvalue=nothing):
        kind, number, _, text = actual
        expected_kind, expected_number, step, expected_text = wanted
        distance = abs(number - expected_number)
        scale = max(abs(expected_number), largest.get(expected_kind, 0) / 100) or 1
        difference = 0 if distance < 1.01 * step else distance / scale
        if str(number) == str(expected_number):  # Both may be inf or nan.
            difference = 0
        if kind != expected_kind or np.isnan(difference):
            difference = np.inf
        apart = max(apart, difference)
        if difference > tolerance:
            differing.append((kind, expected_kind, f" (first {text!r}, not {expected_text!r})"))
    print(f"{name}: {apart:.4f} apart{differing[0][2] if differing else ''}", flush=True)
    return differing


def find_cause(differing, expected):
    """Return how "The number of processes changes this job" goes on."""
    if any(kind != expected_kind for kind, expected_kind, _ in differing):
        return "by a line or number that one run lacks: does each rank print, or the batch grow?"
    # Neither validation ("val", "eval" or "test" in the line, but not "value") nor a learning rate
    # ("lr" right before the number) shows what training did.
    no_training = "(?i)(?<![a-z])((e?val|test)(?!ue)|lr[^#]*#$)"
    training = {kind for kind, *_ in expected if not re.search(no_training, kind)}
    if training and training.isdisjoint(kind for kind, *_ in differing):
        return """only in validation or lr: look at samples that are
read twice, means, random numbers, BatchNorm and, under Adam, a bias before BatchNorm."""
    return """in training or in what it prints:
look at samples, their order, batch size, lr, random numbers, BatchNorm, .module(), means, sums
and, if late, rounding (try float64)."""


def run_for_check(world_size, job, path, limit=1e6, kill_after=np.inf, show=False):
    """Return what a job prints until it ends, or is killed after so many lines.

    job: a script and its options. path: of its checkpoint. limit: seconds until it is ended.
    """
    command = [sys.executable]
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}  # or lines come too late
    options = re.findall(OPTION, Path(job[0]).read_text())
    if "--nproc-per-node" not in options:
        command += [*TORCHRUN, f"--nproc-per-node={world_size}"]
        variables["OMP_NUM_THREADS"] = "1"
        if GPUS == 1:  # Such a script wants a GPU for each process.
            variables["CUDA_VISIBLE_DEVICES"] = ""
    command += job
    # A later option counts, so the job's own --checkpoint stays untouched.
    ours = {"--nproc-per-node": f"{world_size}", "--log-every": "1", "--checkpoint": path}
    for option, value in ours.items():
        if option in options:
            command += [option, value]
    # The job prints into a file, so a child that it leaves behind cannot make this wait.
    with tempfile.NamedTemporaryFile() as out:
        settings = {"stdin": DEVNULL, "stdout": out, "env": variables, "start_new_session": True}
        if kill_after < np.inf:
            settings["stderr"] = DEVNULL  # A job that is killed prints tracebacks.
        process = Popen(command, **settings)
        try:
            lines, began, ended = [], time.monotonic(), False
            with open(out.name, errors="replace") as printed:
                while not ended and len(lines) < kill_after:
                    ended = process.poll() is not None  # before the last lines are read
                    for line in printed:
                        lines.append(line.replace(path, ""))
                        if show:
                            print(line, end="", flush=True)
                    if time.monotonic() - began > limit:
                        sys.exit(
                            f"check: with {world_size} processes the job took over {limit:.0f} s"
                        )
                    time.sleep(0.002)  # A short job would end before it is killed.
        finally:
            end_session(process)
    if ended and process.returncode:
        sys.exit(f"check: with {world_size} processes the job failed (see above)")
    return "".join(lines)


def end_session(process):
    """End a process and all that it has started, with time to end its ranks."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def check(arguments, folder, run=run_for_check):
    """Test whether a job is the same on any number of processes, and over a kill.

    SCRIPT.py is a copy of ddp_reference.py, or any script that torchrun starts. It runs on one
    process, then on 2 and 4 (with several GPUs on up to 16 of them), or on the numbers that divide
    its shares. If it has --checkpoint-every, it is also killed past its middle, and goes on with
    another number. The numbers that it prints are compared, if they have a decimal point or are
    followed by a letter or %, but not if this is a unit of time, size or speed, nor what --ignore
    matches. A difference is relative to the number of one process, or to a hundredth of the largest
    of its kind if that is more. The status is 0 if none exceeds --tolerance. It misses other
    integers, what hardly moves these numbers, what a short run never does, what is equally wrong on
    any number of processes, and what only another kill shows.
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

    most = GPUS if GPUS > 1 else 4  # Ranks of ddp_reference.py can share one GPU.
    kill = ", then it is killed and resumed" if saves else ""
    print(f"check: the job runs on 1 process, then on up to {most}{kill}. First on 1:", flush=True)
    began = time.monotonic()
    one = run(1, job, f"{folder}/1", show=True)
    limit = 60 + 30 * (time.monotonic() - began)
    expected = read_numbers(one, args.ignore)
    if not any(np.isfinite(number) for _, number, *_ in expected):
        return f"check: {job[0]} prints no decimal numbers on stdout (logging uses stderr)"
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
        name = f"over a kill ({counts[-1]} processes, then {counts[-2]} from {numbers[0][3]})"
        if compare(name, numbers, expected[-len(numbers) :], args.tolerance):
            return "The resumed job differs: state is lost, or Adam hid a factor (world size?)."
    print(f"All numbers are equal within the tolerance of {args.tolerance}.")


class TheCheck(TestCase):
    def test_it_reads_results_of_any_format(self):
        results = "loss=0.5, Acc@1:98.25% val/score 1e-3 (nan) | -.5; inf. \x1b[1m0.25\x1b[0m 30dB"
        more = "1.5x loss0.75 97% " + "x" * 2000 + " 0.125"
        others = "0.1 h 3.5ms 2.5 it/s 1.5 GB v2.13.0 7.5s/it 0.5 sec/it a/Sec: 2.5 0:00:01.5 8/12"
        numbers = [number for _, number, *_ in read_numbers(f"{results} {others} {more}")]
        expected = [0.5, 98.25, 1e-3, np.nan, -0.5, np.inf, 0.25, 30, 1.5, 0.75, 97, 0.125]
        np.testing.assert_array_equal(numbers, expected)

    def verdict(self, one, two, *later, job=("job.py",)):
        """Return what check says of a job that prints `one`, on two processes `two`, and then this.

        A third text is that of one process again, or after a kill.
        """
        Path("job.py").write_text("'--checkpoint-every'")
        runs = mock.Mock(side_effect=[f"{text}\n in 2 shares" for text in (one, two, *later)])
        with mock.patch("sys.stdout", io.StringIO()), mock.patch(f"{__name__}.GPUS", 1):
            return check([*job], "", runs) or "equal"

    def test_it_says_where_runs_differ(self):
        one = "loss 1000.0\nloss 0.1000\nval_loss 0.5000"
        self.assertIn("in training", self.verdict(one, one.replace("0.1000", "0.9000"), one))
        self.assertIn("in training", self.verdict(one, one.replace("1000.0", "nan"), one))
        self.assertIn("only in validation", self.verdict(one, one.replace("0.5", "0.6"), one))
        self.assertIn("number that one run lacks", self.verdict(one, f"{one}\nloss 1.0", one))
        self.assertIn("from itself", self.verdict(one, one.replace("0.5", "0.6"), one + " 1.0"))
        noise = "noise 30dB/15dB"
        self.assertIn("in training", self.verdict(noise, "noise 20dB/15dB", noise))
        decimal = one.replace("0.5000", "0.5001")  # One unit of the last decimal may be rounding.
        self.assertEqual("equal", self.verdict(one, decimal, "", "val_loss 0.5000"))

    def test_it_says_whether_a_killed_job_goes_on(self):
        one = "lr 0.1\nloss 0.40\nloss 0.20"
        self.assertEqual("equal", self.verdict(one, one, "lr 0.1\nloss 0.40", "lr 0.1\nloss 0.20"))
        self.assertIn("state is lost", self.verdict(one, one, "", "lr 0.1\nloss 0.30"))
        self.assertIn("did not go on", self.verdict(one, one, "", one))
        self.assertIn("did not go on", self.verdict(one, one, "", ""))

    def test_options_after_the_script_are_the_jobs(self):
        one = "loss 0.4"
        options = ["--ignore", "took.*", "job.py", "--tolerance", "9"]
        self.assertIn("in training", self.verdict(one, "loss 0.6", one, job=options))
        ignored = self.verdict("a 0.1 took 1.0", "a 0.1 took 2.0", "", "", job=options)
        self.assertIn("did not go on", ignored)

    def test_it_ends_any_job(self):
        for text, limit, reason in (
            ("import sys\nsys.exit(1 + len(sys.stdin.read()))", 60, "2 processes the job failed"),
            ("print('loss 0.5', flush=True)\nwhile True: pass", 1, "took over 1 s"),
            ("import os, time\nif os.fork() == 0: time.sleep(99)\nos._exit(3)", 60, "failed"),
        ):
            Path("job.py").write_text(f"# '--nproc-per-node'\n{text}")
            with self.assertRaisesRegex(SystemExit, reason):
                run_for_check(2, ["job.py"], "path", limit=limit)
        Path("job.py").write_bytes(b"# '--nproc-per-node'\nprint('\\udcff 0.5', end='')")
        with mock.patch.dict(os.environ, {"PYTHONIOENCODING": "utf-8:surrogateescape"}):
            self.assertEqual(len(read_numbers(run_for_check(1, ["job.py"], "path"))), 1)

    def test_it_starts_and_kills_scripts_of_torchrun(self):
        text = """
import os, sys, time
if os.environ["RANK"] == "0":
    print(" ".join([os.environ["WORLD_SIZE"], *sys.argv[1:]]), flush=True)
    time.sleep(99 * ("killed" in sys.argv))
"""
        Path("job.py").write_text(f"options = '--checkpoint', '--log-every'{text}")

        ended = run_for_check(2, ["job.py", "--lr", "0.1"], "path")
        killed = run_for_check(1, ["job.py", "killed"], "path", kill_after=1)

        self.assertEqual(ended, "2 --lr 0.1 --log-every 1 --checkpoint \n")
        self.assertIn("1 killed", killed)


# ---- bash run.sh review
# Each faulty program is the README's many.py with one edit: (row of the README's table, what shows
# the fault, old text, new text). What shows it is a key of SHOWN_BY. The order tells nothing.
SHOWN_BY = {
    "check": "`check` finds it: two processes print other numbers than one.",
    "fails": "`check` finds it: with two processes the job fails. (On GPUs it may hang.)",
    "blind": "`check` cannot find it, because all numbers of processes print the same.",
}
LOOP = "    for x, y in loader:\n"
AUGMENT = "        x *= 4 * torch.rand(len(x), 1, 1)\n"
ADD_UP = "    dist.all_reduce(num_correct)\n"
IF_RANK_0 = "    if rank == 0:\n"
HALVE_LR = '        optimizer.param_groups[0]["lr"] /= 2\n'
CONV = "torch.nn.Conv1d(3, 3, 3, padding=1)"
NORM = f"torch.nn.Sequential(torch.nn.BatchNorm1d(3), {CONV})"
STOP = "    if num_correct > 0.973 * 64 * len(val_sampler):\n        break\n"
FAULTS = {
    "a": (25, "check", ADD_UP, ""),
    "b": (1, "check", " // world_size", ""),
    "c": (4, "blind", "    sampler.set_epoch(epoch)\n", ""),
    "d": (24, "check", "range(rank, len(val_set), world_size)", "DistributedSampler(val_set)"),
    "e": (14, "check", CONV, NORM),
    "f": (32, "fails", ADD_UP + IF_RANK_0, IF_RANK_0 + "    " + ADD_UP),
    "g": (5, "check", "Sampler(train_set, ", "Sampler(train_set, seed=rank, "),
    "h": (12, "check", "y.to(device))\n", "y.masked_fill(x[:, :1, 0] > 0, -100).to(device))\n"),
    "i": (49, "blind", "model.module.state_dict()", "model.state_dict()"),
    "j": (7, "check", "cross_entropy(model(", "cross_entropy(model.module("),
    "k": (35, "fails", ADD_UP, STOP + ADD_UP),
    "l": (16, "check", LOOP, LOOP + AUGMENT),
    "m": (3, "check", "Sampler(train_set, ", "Sampler(train_set, num_replicas=1, rank=0, "),
    "n": (13, "check", "y.to(device))\n", 'y.to(device), reduction="sum") / (16 * 64)\n'),
    "o": (9, "check", ADD_UP + IF_RANK_0, ADD_UP + IF_RANK_0 + HALVE_LR),
}
# The long faulty program is the README's resume.py with this diff, which names the rows.
TRAIN = """\
 from contextlib import nullcontext
 import torch
+from torch import nn
 import torch.distributed as dist
 from torch.nn.functional import cross_entropy
 from torch.nn.parallel import DistributedDataParallel
@@
-x = torch.randn(121, 3, 64)
+x = torch.randn(147, 3, 64)
 y = x.max(dim=1).indices  # The label of a position is its largest channel.
-train_set, val_set = random_split(TensorDataset(x, y), [96, 25])
-model = torch.nn.Conv1d(3, 3, 3, padding=1).to(device)
-optimizer = torch.optim.SGD(model.parameters(), lr=1)
-first_epoch = 0
-found = [os.path.exists(path)]
-dist.broadcast_object_list(found)  # row 36
-if found[0]:
-    saved = torch.load(path, map_location="cpu", weights_only=True)  # row 42
+torch.manual_seed(rank)
+train_set, val_set = random_split(TensorDataset(x, y), [96, 51])  # row 5: Each rank's differ.
+norm = nn.BatchNorm1d(16)  # row 14: It sees 8 samples, whatever the step has. (May be intended.)
+stem = nn.Sequential(nn.Conv1d(3, 16, 3, padding=1, bias=False), norm, nn.ReLU())
+stem.requires_grad_(False)  # The last layer learns first.
+model = nn.Sequential(stem, nn.Dropout(0.1), nn.Conv1d(16, 3, 1)).to(device)
+optimizer = torch.optim.SGD(model.parameters(), lr=1)
+first_epoch, best, bad_epochs = 0, 0, 0
+if os.path.exists(path):  # row 36: On another machine a rank may not find the file.
+    saved = torch.load(path)  # row 42: There is no map_location.
@@
-batch_size = 16 // (world_size * accum_steps)  # row 1
+batch_size = 16 // accum_steps  # row 1: A step has 16 samples on each rank, but lr stays.
@@
-val_sampler = range(rank, len(val_set), world_size)  # row 24
+num_steps = 4 * len(loader)  # row 2: It counts batches, but accum_steps of them make a step.
+scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
+val_sampler = DistributedSampler(val_set, shuffle=False)  # row 24: On two ranks, 51 become 52.
@@
-for epoch in range(first_epoch, 3):
-    sampler.set_epoch(epoch)  # row 4
+for epoch in range(first_epoch, 4):  # row 4: set_epoch() is missing.
+    if epoch >= 2:
+        stem.requires_grad_(True)  # row 8: DDP was made before, so it does not know the stem.
     model.train()
-    batches = iter(loader)
-    for step in range(len(loader) // accum_steps):  # row 11
-        step_batches = [next(batches) for _ in range(accum_steps)]
-        num_labels = sum((y != -100).sum() for x, y in step_batches).to(device)
-        dist.all_reduce(num_labels)  # row 12
-        for index, (x, y) in enumerate(step_batches):
-            is_last = index == accum_steps - 1
-            with nullcontext() if is_last else model.no_sync():  # row 10
-                loss_sum = cross_entropy(model(x.to(device)), y.to(device), reduction="sum")
-                (loss_sum * world_size / num_labels).backward()
-        optimizer.step()
-        optimizer.zero_grad()
+    for index, (x, y) in enumerate(loader):  # row 11: On 4 processes, there are 3 batches.
+        y[x[:, 0] > 1] = -100  # Loud places have no label.
+        sync = model.no_sync() if index % accum_steps else nullcontext()  # row 10: So is the last.
+        with sync:
+            loss = cross_entropy(model(x.to(device)), y.to(device))
+            (loss / accum_steps).backward()  # row 12: Batches have unequal numbers of labels.
+        if index % accum_steps:
+            optimizer.step()
+            optimizer.zero_grad()
+            scheduler.step()
@@
-            num_correct += (model.module(x.to(device)).argmax(dim=1) == y.to(device)).sum()
-    dist.all_reduce(num_correct)  # row 25
+            y, logits = y.to(device), model.module(x.to(device))
+            num_correct += (logits.argmax(dim=1) == y).sum()  # row 28: BatchNorm's, here.
+    dist.reduce(num_correct, dst=0)
+    bad_epochs = 0 if num_correct > best else bad_epochs + 1
+    best = max(best, num_correct.item())
     if rank == 0:
-        print(f"epoch {epoch} | val_accuracy {num_correct / (25 * 64):.4f}")
-        saved = {"net": model.module.state_dict(), "epoch": epoch + 1}  # row 49
-        saved["optimizer"] = optimizer.state_dict()  # row 52
-        torch.save(saved, f"{path}.tmp")
-        os.replace(f"{path}.tmp", path)  # row 50
+        accuracy = num_correct / (len(val_set) * 64)
+        text = f"loss {loss:.4f}"  # row 25: It is that of rank 0's last batch.
+        print(f"epoch {epoch} | {text} | val_accuracy {accuracy:.4f}")
+        saved = {"net": model.module.state_dict(), "epoch": epoch + 1}
+        saved["optimizer"] = optimizer.state_dict()  # row 52: Not the scheduler and best.
+        torch.save(saved, path)  # row 50: A kill while it saves leaves half a file.
+    if bad_epochs == 2:  # row 35: Only rank 0 has the sum of all ranks, yet every rank decides.
+        break
"""


def faulty_programs():
    """Return the README's many.py and the faulty programs as {name: text}, with notes in train."""
    readme = readme_programs()
    many = without_notes(readme["many.py"])
    programs = {"many": many}
    for name, (_, _, old, new) in FAULTS.items():
        programs[name] = edited(many, old, new)
    return programs | {"train": patched(readme["resume.py"], TRAIN)}


def without_notes(program):
    """Return a program without the comments that name rows of the README's table."""
    return re.sub(r"(?m)  # row .*$", "", program)


def answers():
    """Return the lines that `bash run.sh review --answers` prints."""
    titles = dict(re.findall(r"(?m)^\| (\d+) \| (.*?) \|", README.read_text()))
    programs = faulty_programs()
    many = programs["many"].splitlines()
    lines = []
    for name, (row, shown_by, *_) in FAULTS.items():
        pairs = zip(programs[name].splitlines(), many)
        line = next(number for number, (new, old) in enumerate(pairs, start=1) if new != old)
        lines.append(f"{name}.py, line {line}: row {row}, {titles[str(row)]} {SHOWN_BY[shown_by]}")
    for line, text in enumerate(programs["train"].splitlines(), start=1):
        for row, note in re.findall("# row (.*?): (.*)", text):
            lines.append(f"train.py, line {line}: row {row}, {titles[row]} {note}")
    return lines


def review(arguments):
    """Write faulty programs into a folder, or with --answers print what is wrong in them."""
    parser = ArgumentParser("review", usage="bash run.sh review FOLDER, or review --answers")
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--answers", action="store_true")
    args = parser.parse_args(arguments)
    if args.answers:
        print("\n".join(answers()))
        return
    if not args.folder:
        parser.error("name a folder")
    os.makedirs(args.folder, exist_ok=True)
    programs = faulty_programs()
    del programs["many"]
    for name, text in programs.items():
        Path(args.folder, f"{name}.py").write_text(without_notes(text))
    count = len(programs)
    print(f"""wrote {count} programs to {args.folder}. Each has a fault, but train.py has seventeen.
They train on several GPUs, and torchrun starts them. What is wrong, in which line, and what does
it do to a training? (bash run.sh review --answers)""")


def run_all(programs, world_size):
    """Run programs one after another in one job of so many ranks: return {name: printed}."""
    (out, *_) = run_job(world_size, main=partial(be_all, programs))
    texts = re.split(r"(?m)^---- (.*)\n", out)
    return dict(zip(texts[1::2], texts[2::2]))


def be_all(programs):
    """In place of main(): run the programs on the CPU, in one process group."""
    dist.init_process_group("gloo")
    destroy = dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    for name, text in programs.items():
        print(f"---- {name}")
        exec(on_cpu(text), {})
        if name == "i" and dist.get_rank() == 0:
            print(list(torch.load("model.pt")))
    destroy()


class TheReview(TestCase):
    def test_each_faulty_program_shows_what_the_answers_say(self):
        programs = faulty_programs()
        del programs["train"]
        failing = [name for name, (_, shown_by, *_) in FAULTS.items() if shown_by == "fails"]
        for name in failing:
            text = on_cpu(programs.pop(name))  # NCCL may hang.
            self.assertIn("epoch 0", printed_by(text, 1))
            with self.assertRaises(FAILED):
                printed_by(text, 2)
        one, two = (run_all(programs, ranks) for ranks in (1, 2))
        for name in programs.keys() - {"many"}:
            with mock.patch("sys.stdout", io.StringIO()):
                differs = compare("", read_numbers(two[name]), read_numbers(one[name]), 0.0005)
            self.assertEqual("check" if differs else "blind", FAULTS[name][1], name)
        self.assertEqual(one["many"], two["many"])
        self.assertNotEqual(one["c"], one["many"])
        self.assertIn("module.weight", two["i"])

    def test_the_readme_shows_what_check_says_of_a_fault(self):
        text = re.sub(r"(?m)^.*# row 25\n", "", readme_programs()["many.py"])
        runs = [printed_by(text, ranks) for ranks in (1, 2, 4, 1)]
        Path("job.py").write_text("")
        with (
            mock.patch("sys.stdout", io.StringIO()) as out,
            mock.patch(f"{__name__}.GPUS", 1),
        ):
            verdict = check(["job.py"], "", mock.Mock(side_effect=runs))
        shown = "2 processes: " + out.getvalue().split("2 processes: ")[1] + verdict
        self.assertTrue(shown in README.read_text(), shown)

    def test_the_long_program_depends_on_the_number_of_processes(self):
        train = on_cpu(faulty_programs()["train"])  # NCCL may hang.
        numbers = []
        for ranks in (1, 2):
            printed = printed_by(train, ranks, f"--checkpoint train{ranks}")
            numbers.append(read_numbers(printed))
        with mock.patch("sys.stdout", io.StringIO()):
            self.assertTrue(compare("", numbers[1], numbers[0], 0.1))

    def test_answers_name_a_line_of_each_program(self):
        lines = answers()
        self.assertEqual(len(lines), len(FAULTS) + 17)
        self.assertIn("a.py, line 39: row 25, The number is one rank's.", lines[0])
        self.assertIn("train.py, line 32: row 42, A file is loaded to GPU 0.", lines[18])


def main():
    """Do `check`, `review` or `programs`, or run the tests."""
    command, *arguments = [*sys.argv[1:], ""]
    if command == "programs":
        for name, text in readme_programs().items():
            if not os.path.exists(name):
                Path(name).write_text(text)
                print(f"wrote {name}")
    elif command == "review":
        review(arguments[:-1])
    elif command == "check":
        for number in (signal.SIGINT, signal.SIGTERM):  # so that no process and no file is left
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TMPDIR"] = folder
            sys.exit(check(arguments[:-1], folder))
    else:
        run_tests()


def run_tests():
    """Run the tests, and count a test that fails by several subtests once."""
    result = unittest.main(exit=False, verbosity=2).result
    failed = len({str(test).split()[0] for test, _ in result.failures + result.errors})
    skipped = len(result.skipped)
    passed = max(0, result.testsRun - failed - skipped)  # setUpModule() may have failed.
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed > 0 or not result.testsRun)  # -k may name no test.


# ---- Answers to the lessons
# 0: On rank 0, which has i at index i, all are wrong, because 2 * i + 1 is right. On rank 1, which
#    has i + 1, all are wrong but the one at index 0.
# 1: Both read rank 0's samples: half of all, each twice. The other half is never read.
# 2: On rank 0 it is 1/220, which is 1/110 halved by DDP's average. On rank 1 it is 1/320. On both
#    it should be 1/270. On one rank all is right, so the lesson fails on two.
# 3: On one rank none are. On two, rank 1's 12 are: it keeps the running means of its own share.
#    So the lesson fails on two. In the loop, rank 0 waits in its third round, because rank 1 has
#    only two. In a longer job rank 1 would go on, and its next collective would answer.
# 4: 2 and 1 fail, because all shares of a rank then drop the same logits. On 4, each has one share.
# 5: Only the momentum does, which the optimizer holds. The rest follows from the samples read.
if __name__ == "__main__":
    main()
