"""The guarantees of ddp_reference.py. The names of the tests are the list of them.

    bash run.sh test                            # all; also: python -m pytest test_ddp_reference.py
    bash run.sh test -k Lesson                  # the classes or tests whose names hold a word
    bash run.sh test my_job.py [its options]    # the guarantees for a job of your own

First come six lessons: what data-parallel training guarantees, compared with what must come out:
with PyTorch's own sampler, one process on the whole batch, a job that was not interrupted. They use
three helpers, which stand below the rule. on_ranks(3, function, *args) calls a function in each of
three processes that form a group, and returns the three results. job(options, stop_at=3) is one
rank of ddp_reference's own loop, here stopped after two steps; it returns what it printed (out) and
its net (state_dict). assert_close() allows for the rounding of float32, 1e-5.
"""

import ast
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import importlib
import io
import itertools
import math
import multiprocessing
import os
import pathlib
import pickle
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import traceback
import tracemalloc
import types
import unittest
import warnings
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.profiler import profile
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, default_collate
from torch.utils.data import DistributedSampler as TorchSampler

import ddp_reference as ddp

CPU = torch.device("cpu")
GPUS = torch.cuda.device_count()
HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE / "ddp_reference.py"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
TORCHRUN = ["-m", "torch.distributed.run", "--local-addr=127.0.0.1"]  # whatever the host's name is
ONE_MACHINE = [*TORCHRUN, "--standalone"]
SMALL = "--num-samples 44 --length 64 --epochs 2"


# ---- Lesson 1: which samples a rank reads
# Without a global batch a rank has the indices of PyTorch's own sampler. With one, each step has
# the same samples on any number of ranks. To break it, leave out `+ self.epoch` in the sampler's
# __iter__: test_without_a_global_batch_the_indices_are_those_of_torchs_sampler turns red.
class Lesson1Sampler(unittest.TestCase):
    def test_without_a_global_batch_the_indices_are_those_of_torchs_sampler(self):
        booleans = True, False
        small = itertools.product(range(20), range(1, 8), booleans, booleans)
        large = [(n, 2, True, False) for n in (16383, 16384, 16385)]  # two chunks of 8192
        for n, num_replicas, shuffle, drop_last in [*small, *large]:
            for rank in range(num_replicas):
                arguments = range(n), num_replicas, rank
                options = {"shuffle": shuffle, "seed": 7, "drop_last": drop_last}
                ours = ddp.DistributedSampler(*arguments, **options)
                torchs = TorchSampler(*arguments, **options)
                self.assertEqual(list(ours), list(torchs))  # of epoch 0
                ours.set_epoch(5)
                torchs.set_epoch(5)

                self.assertEqual(list(ours), list(torchs))
                self.assertEqual(vars(ours) | vars(torchs), vars(ours))  # and the same attributes

    def test_with_a_global_batch_steps_are_the_same_on_any_number_of_ranks_after_any_start(self):
        data, booleans = range(23), (True, False)
        order = list(ddp.DistributedSampler(data, 1, 0))  # of one rank: torch's order
        cases = itertools.product((1, 2, 3, 5), (5, 8), range(24), booleans)
        for num_replicas, batch, start, drop_last in cases:
            batches = []
            for rank in range(num_replicas):
                options = {"drop_last": drop_last, "global_batch_size": batch}
                sampler = ddp.DistributedSampler(data, num_replicas, rank, **options)
                sampler.set_epoch(0, start)
                share = ddp.share_size(batch, rank, num_replicas)
                batches.append(list(BatchSampler(sampler, share, drop_last=False)))
                self.assertEqual(len(sampler), sum(map(len, batches[-1])))
            steps = []
            for shares in itertools.zip_longest(*batches, fillvalue=[]):
                positions = range(sum(map(len, shares)))  # Position p went to rank p % W.
                steps.append([shares[p % num_replicas][p // num_replicas] for p in positions])

            expected = [order[i : i + batch] for i in range(start, 23, batch)]
            if drop_last:
                expected = [step for step in expected if len(step) == batch]
            self.assertEqual(steps, expected)


# ---- Lesson 2: nine cases of two ranks
# What goes wrong without a sampler and without set_epoch, and what becomes of samples that do not
# fill a batch or a step: `bash run.sh cases`. To break it, call `sampler.set_epoch(epoch)` always
# in show_case: test_the_cases_show_the_batches_of_torchs_sampler turns red.
class Lesson2Cases(unittest.TestCase):
    maxDiff = None
    # What torch.utils.data.DistributedSampler gives: put it into show_case to see it.
    EXPECTED = """
case 1: no sampler: every rank reads everything
8 samples, 2 ranks, batches of 4
  epoch 0  rank 0  [0, 1, 2, 3] [4, 5, 6, 7]
  epoch 0  rank 1  [0, 1, 2, 3] [4, 5, 6, 7]
  epoch 1  rank 0  [0, 1, 2, 3] [4, 5, 6, 7]
  epoch 1  rank 1  [0, 1, 2, 3] [4, 5, 6, 7]

case 2: with the sampler: ranks split the data, the same way every epoch
8 samples, 2 ranks, batches of 4
  epoch 0  rank 0  [4, 7, 2, 1]
  epoch 0  rank 1  [0, 3, 5, 6]
  epoch 1  rank 0  [4, 7, 2, 1]
  epoch 1  rank 1  [0, 3, 5, 6]

case 3: set_epoch: a new split each epoch
8 samples, 2 ranks, batches of 4
  epoch 0  rank 0  [4, 7, 2, 1]
  epoch 0  rank 1  [0, 3, 5, 6]
  epoch 1  rank 0  [5, 2, 7, 1]
  epoch 1  rank 1  [4, 6, 3, 0]

case 4: 3 samples a rank: short batches are kept
6 samples, 2 ranks, batches of 4
  epoch 0  rank 0  [2, 3, 1]
  epoch 0  rank 1  [5, 0, 4]
  epoch 1  rank 0  [2, 3, 1]
  epoch 1  rank 1  [5, 0, 4]

case 4, dropping the short batch: a batch of 4 never fills
6 samples, 2 ranks, batches of 4
  epoch 0  rank 0
  epoch 0  rank 1
  epoch 1  rank 0
  epoch 1  rank 1

case 5: 5 samples on 2 ranks: one is repeated to make 6
5 samples, 2 ranks, batches of 4
  epoch 0  rank 0  [4, 1, 2]
  epoch 0  rank 1  [0, 3, 4]
  epoch 1  rank 0  [4, 1, 2]
  epoch 1  rank 1  [0, 3, 4]

case 5, with set_epoch: it is the first of that epoch's order
5 samples, 2 ranks, batches of 4
  epoch 0  rank 0  [4, 1, 2]
  epoch 0  rank 1  [0, 3, 4]
  epoch 1  rank 0  [0, 2, 1]
  epoch 1  rank 1  [4, 3, 0]

case 6: last batches of one sample, which BatchNorm may refuse
10 samples, 2 ranks, batches of 4
  epoch 0  rank 0  [4, 7, 3, 0] [6]
  epoch 0  rank 1  [1, 5, 9, 8] [2]
  epoch 1  rank 0  [4, 7, 3, 0] [6]
  epoch 1  rank 1  [1, 5, 9, 8] [2]

case 7: drop_last: that batch is gone
10 samples, 2 ranks, batches of 4
  epoch 0  rank 0  [4, 7, 3, 0]
  epoch 0  rank 1  [1, 5, 9, 8]
  epoch 1  rank 0  [4, 7, 3, 0]
  epoch 1  rank 1  [1, 5, 9, 8]
"""

    def test_the_cases_show_the_batches_of_torchs_sampler(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ddp.main(["cases"])

        self.assertEqual(re.sub(" +\n", "\n", out.getvalue()), self.EXPECTED)


# ---- Lesson 3: a step
# Every rank ends a step with the parameters of one process that had the whole batch, however
# unequally many labels the ranks have. To break it, leave out `* dist.get_world_size()` in
# train_step: test_on_any_number_of_ranks_a_step_is_that_of_one_process_on_the_whole_batch turns
# red.
def plain_net():
    """Return a net without BatchNorm, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 3, padding=1))


def uneven_data(num_samples):
    """Return samples of 40 labels, of which from none to all are ignored."""
    data = list(ddp.SyntheticDataset(num_samples, 40))
    for i, (_, y) in enumerate(data):
        y[: i * 17 % 60] = -100  # 0, 17, 34, all, 8, 25, all, ...
    return data


def share_of_rank(x, y, micro_batch_size):
    """Return this rank's micro-batches of a step on all of (x, y)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = x[rank::world_size], y[rank::world_size]
    [micro_batches] = ddp.read_steps(  # of one step
        loader=[share] if len(share[0]) else [],
        samples_read=0,
        num_samples=len(x),
        global_batch_size=len(x),
        micro_batch_size=micro_batch_size,
        stand_in=(x[:1], y[:0]),
    )
    return micro_batches


def step_on_a_share(x, y, micro_batch_size, **options):
    """Make a step with SGD on this rank's share of a batch: return (parameters, the job's sums)."""
    model = DistributedDataParallel(plain_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1)  # Adam would hide a wrong factor.
    micro_batches = share_of_rank(x, y, micro_batch_size)
    sums = ddp.train_step(model, optimizer, micro_batches, seed=(0,), **options)
    return list(model.module.parameters()), ddp.all_reduce_sums(sums)


def step_of_one_process(x, y):
    """The same in plain PyTorch, on the whole batch."""
    module = plain_net()
    logits = module(x)
    loss, labels = F.cross_entropy(logits, y), (y >= 0).sum()
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=1).step()
    sums = torch.stack([loss * labels, (logits.argmax(1) == y).sum(), labels])
    return list(module.parameters()), sums.double().detach()


class Lesson3Step(unittest.TestCase):
    def test_on_any_number_of_ranks_a_step_is_that_of_one_process_on_the_whole_batch(self):
        x, y = default_collate(uneven_data(12))
        expected = step_of_one_process(x, y)

        for ranks, micro_batch_size in ((1, 5), (2, 4), (3, 4), (3, 1), (5, 2), (5, 1)):
            with self.subTest(ranks=ranks, micro_batch_size=micro_batch_size):
                for step in on_ranks(ranks, step_on_a_share, x, y, micro_batch_size):
                    assert_close(step, expected)

    def test_a_rank_without_a_sample_takes_part_and_does_not_count(self):
        x, y = default_collate(uneven_data(3)[1:])
        expected = step_of_one_process(x, y)

        for step in on_ranks(3, step_on_a_share, x, y, 4):
            assert_close(step, expected)


# ---- Lesson 4: evaluation
# Loss and accuracy are those of one batch in one process, whatever the ranks' shares are and their
# BatchNorm's statistics: rank 0's count. To break it, put `sums.cpu()` for all_reduce_sums(sums):
# test_on_1_to_4_ranks_it_gives_the_numbers_of_one_batch_in_one_process differs in the fourth digit.
def net_of_rank():
    """Return a net whose BatchNorm has other statistics on each rank; gloo sends slices wrongly."""
    net = nn.Sequential(plain_net(), nn.BatchNorm1d(3))
    net[1].running_mean = torch.zeros(6)[::2]
    if dist.is_initialized():
        net[1].running_mean[0] += dist.get_rank()
    return net


def evaluation(num_samples):
    """Return the loss and the accuracy that evaluate() gives on this rank."""
    data = ddp.SyntheticDataset(num_samples, 40)
    sampler = ddp.DistributedSampler(data, shuffle=False, global_batch_size=7)
    # Batches of 4 fit neither into the shares nor into the data.
    return ddp.evaluate(net_of_rank(), DataLoader(data, 4, sampler=sampler), CPU)


def loss_and_accuracy(module, data):
    """Return what evaluation must give, from one batch in one process."""
    x, y = default_collate(list(data))
    logits = module(x)
    accuracy = (logits.argmax(1) == y).double().mean()
    return [F.cross_entropy(logits, y).item(), accuracy.item()]


class Lesson4Evaluation(unittest.TestCase):
    def test_on_1_to_4_ranks_it_gives_the_numbers_of_one_batch_in_one_process(self):
        net_of_rank_0 = net_of_rank()  # Here is no group.
        expected = loss_and_accuracy(net_of_rank_0.eval(), ddp.SyntheticDataset(25, 40))

        for world_size in (1, 2, 3, 4):
            for numbers in on_ranks(world_size, evaluation, 25):
                assert_close(numbers, expected)


# ---- Lesson 5: BatchNorm over the job
# It is one nn.BatchNorm over what all ranks compute at once, the whole global batch if a share is
# one micro-batch. To break it, leave out `+ counts * (means - job_mean).square()`:
# test_outputs_gradients_and_statistics_are_those_of_one_process turns red.
SHARES = (4, 3, 2), (4, 0, 5), (0, 0, 9)  # samples of each of three ranks


def net_with_batch_norm(affine=True, momentum=0.1):
    """Return a net with BatchNorm in two dimensions, and on features."""
    options = {"affine": affine, "momentum": momentum}
    return nn.Sequential(
        nn.BatchNorm2d(3, **options),
        nn.Tanh(),
        nn.Flatten(),
        nn.BatchNorm1d(12, **options),
    )


def run_net(net, x, gradient):
    """Run a net forward and backward, in autocast, where statistics must stay float32.

    Return its outputs, the gradient of x, those of its parameters, and its buffers.
    """
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(x)
    (output[: len(gradient)] * gradient).sum().backward()  # of a stand-in no row
    gradients = [parameter.grad for parameter in net.parameters()]
    return output.detach(), x.grad, gradients, dict(net.named_buffers())


def share_through_net(shares, x, gradient, options):
    """Return what run_net() does for this rank's part of x, with SyncBatchNorm.

    The gradients of the parameters are those of all ranks; a rank without a sample has a stand-in.
    """
    rank = dist.get_rank()
    begin = sum(shares[:rank])
    part = slice(begin, begin + shares[rank])
    net = net_with_batch_norm(**options)
    ddp.sync_batch_norm(net)
    ddp.SyncBatchNorm.is_stand_in = not shares[rank]
    x = x[part] if shares[rank] else torch.full_like(x[:1], 100)  # That would be seen.
    results = run_net(net, x, gradient[part])
    for parameter_gradient in results[2]:
        dist.all_reduce(parameter_gradient)
    return results


class Lesson5BatchNorm(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)

    def assert_same_as_one_process(self, x, tolerance=1e-6, **options):
        gradient = torch.randn(9, 12) / 10
        expected = run_net(net_with_batch_norm(**options), x, gradient)
        close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)

        for shares in SHARES:
            ranks = on_ranks(3, share_through_net, shares, x, gradient, options)

            samples = [(r[0], r[1]) for r, share in zip(ranks, shares, strict=True) if share]
            outputs, x_gradients = (torch.cat(parts) for parts in zip(*samples, strict=True))
            close((outputs, x_gradients), expected[:2])
            for rank, share in zip(ranks, shares, strict=True):
                close(rank[2:], expected[2:])
                if not share:
                    self.assertEqual(rank[1].abs().max(), 0)

    def test_outputs_gradients_and_statistics_are_those_of_one_process(self):
        self.assert_same_as_one_process(torch.randn(9, 3, 2, 2))

    def test_so_they_are_without_parameters_and_with_a_cumulative_average(self):
        self.assert_same_as_one_process(torch.randn(9, 3, 2, 2), affine=False, momentum=None)

    def test_so_they_are_on_bfloat16_to_its_precision(self):
        self.assert_same_as_one_process(torch.randn(9, 3, 2, 2).bfloat16(), tolerance=1e-2)

    def test_so_they_are_far_from_zero_where_sums_of_squares_would_cancel(self):
        self.assert_same_as_one_process(1000 + torch.randn(9, 3, 2, 2), tolerance=1e-3)


# ---- Lesson 6: the number of processes changes nothing, and a stopped job goes on
# On other numbers of ranks the epochs print the same, also after stops; on the same number each bit
# is the same, for which settle_buckets() is there. To break it, save `"optimizer": {}` in save_job:
# test_so_it_does_stopped_on_4_ranks_and_resumed_on_3_then_5_then_2 turns red.
def epochs_of(out):
    """Return what a job printed of its epochs, up to the speed."""
    return re.findall(r"epoch .*(?= \|)", out)


def digest_of(out):
    """Return what a job printed of its parameters at the end."""
    return re.findall(r"parameters sha256 \S+", out)


class Lesson6NumberOfRanks(unittest.TestCase):
    def test_the_shipped_net_trains_the_same_on_1_2_3_and_5_ranks(self):
        for num_samples in (83, 96, 100):
            options = f"--num-samples {num_samples} --length 64 --epochs 2"
            expected = on_ranks(1, job, options)[0]

            for world_size in (2, 3, 5):
                trained = on_ranks(world_size, job, options)[0]
                with self.subTest(num_samples=num_samples, world_size=world_size):
                    self.assertEqual(epochs_of(trained.out), epochs_of(expected.out))
                    assert_close(trained.state_dict, expected.state_dict)

    def test_so_it_does_stopped_on_4_ranks_and_resumed_on_3_then_5_then_2(self):
        options = "--num-samples 100 --length 64 --epochs 4"
        expected = on_ranks(1, job, options)[0]

        out = ""
        with tempfile.TemporaryDirectory() as folder:
            options += f" --checkpoint-every 1 --checkpoint {folder}/elastic.pt"
            for world_size, stop_at in ((4, 3), (3, 5), (5, 6), (2, None)):
                trained = on_ranks(world_size, job, options, stop_at=stop_at)[0]
                out += trained.out

        self.assertIn("epoch 2, 24 samples read", out)  # 2 + 4 + 5 steps, of 5 in an epoch
        self.assertEqual(epochs_of(out), epochs_of(expected.out))
        assert_close(trained.state_dict, expected.state_dict)

    def test_stopped_and_resumed_on_as_many_ranks_it_ends_with_the_same_bits(self):
        for world_size in (2, 3):
            options = f"{SMALL} --micro-batch-size 1 --global-batch-size {2 * world_size}"
            expected = on_ranks(world_size, job, options)[0].out

            out = ""
            with tempfile.TemporaryDirectory() as folder:
                options += f" --checkpoint-every 1 --checkpoint {folder}/exact.pt"
                for stop_at in (3, 7, None):
                    out += on_ranks(world_size, job, options, stop_at=stop_at)[0].out

            with self.subTest(world_size=world_size):
                self.assertEqual(out.count("resuming from"), 2)
                self.assertEqual(epochs_of(out), epochs_of(expected))
                self.assertEqual(digest_of(out), digest_of(expected))


# ------------------------------------------------------------------------------------------------
# The above is what data-parallel training guarantees. What follows are the helpers, and faults that
# cost somebody a day.


# ---- Helpers
def setUpModule():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # All is on the CPU but OnGPUs.
    os.environ["KINETO_LOG_LEVEL"] = "6"  # PyTorch's profiler would print that it starts and stops.
    torch.set_num_threads(1)  # This process computes as the ranks do.
    # A shell starts `tests &` with Ctrl-C ignored, which the jobs would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def tearDownModule():
    processes().shutdown()


def end_with_parent():
    """End this process when the one that started it ends."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@functools.cache
def processes():
    """Up to six processes for on_ranks(), forked from one that has imported torch.

    torch._dynamo is what PyTorch imports to make the first optimizer of a process.
    """
    multiprocessing.set_forkserver_preload(["torch._dynamo"])
    context = multiprocessing.get_context("forkserver")
    return concurrent.futures.ProcessPoolExecutor(6, context, end_with_parent)


def as_rank(rank, world_size, path, function, args, options):
    """Return function(*args, **options), called in a gloo group."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    store, timeout = dist.FileStore(path, world_size), datetime.timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        result = function(*args, **options)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def on_ranks(world_size, function, *args, **options):
    """Call a function on each rank of a group of 1 to 6 processes, and return the results.

    on_ranks(3, dist.get_rank) is [0, 1, 2], and on_ranks(2, job, "--epochs 1")[0].out is what a job
    of two ranks prints.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = world_size, f"{folder}/store", function, args, options
        ranks = [processes().submit(as_rank, rank, *call) for rank in range(world_size)]
        concurrent.futures.wait(ranks, return_when=concurrent.futures.FIRST_EXCEPTION)
        concurrent.futures.wait(ranks, timeout=3)
        errors = [rank.exception() for rank in ranks if rank.done() and rank.exception()]
        if errors:  # A rank that has only lost another raises a RuntimeError.
            raise min(errors, key=lambda error: isinstance(error, RuntimeError))
        return [rank.result() for rank in ranks]


def job(options, task=ddp.make_task, stop_at=None, terminal=False, parser=None):
    """Run one rank of a job, to its end or until it would make its step number `stop_at`.

    job("--epochs 2 --length 64") is one of the shipped net; task is another make_task.
    Returns what it printed (out), the tensors of its net at the end (state_dict), for each step the
    sums of x and the numbers of labels, ignored ones included, of its micro-batches (x_sums,
    labels; 0 labels for a stand-in), and how often it told the watchdog that it goes on (resets).
    """
    options = [*shlex.split(options), f"--nproc-per-node={dist.get_world_size()}"]
    parser = parser or ddp.make_parser()
    args = parser.parse_args(options)
    ddp.decide_processes(args, parser.error)
    ddp.decide_batches(args, parser.error)
    device = CPU
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    result = types.SimpleNamespace(x_sums=[], labels=[], resets=0)
    train_step = ddp.train_step

    def noting_step(model, optimizer, micro_batches, *args, **options):
        result.state_dict = model.module.state_dict()  # the net's own tensors, no copies
        if len(result.x_sums) + 1 == stop_at:
            raise InterruptedError
        result.x_sums.append([x.sum().item() for x, _ in micro_batches])
        result.labels.append([y.numel() for _, y in micro_batches])
        return train_step(model, optimizer, micro_batches, *args, **options)

    class Watchdog(ddp.Watchdog):
        def __init__(self):
            self.steps_begun = 0  # It has no thread.

    watchdog = Watchdog()
    with (
        mock.patch.object(ddp, "train_step", noting_step),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.suppress(InterruptedError),
    ):
        out.isatty = lambda: terminal
        ddp.train(args, device, task, watchdog)
    result.out, result.resets = out.getvalue(), watchdog.steps_begun
    return result


def error_of_job(options, task=ddp.make_task):
    """Return the error with which one rank of a job ends.

    on_ranks(2, error_of_job, "", task) is the errors of two ranks, as "ValueError: no sample".
    """
    try:
        job(options, task)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def start(*command, **environ):
    """Start a Python program with its output in pipes, in a process group of its own.

    finish(start(SCRIPT, "--epochs", 1, OMP_NUM_THREADS="3")) is what it prints.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', HERE)}",
    }
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=os.environ | defaults | environ,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process, status=0):
    """Return (stdout, stderr) of a program, once every process that holds them has ended.

    It must end with this exit status, and within 300 seconds.
    """
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with process, contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, f"status {process.returncode}\n{out}\n{err}"
    return out, err


def run(*command, status=0, **options):
    """Run a Python program to its end, as in out, err = run(SCRIPT, "--epochs", 1)."""
    return finish(start(*command, **options), status)


def with_sgd(args, train_set, val_set, net, **options):
    """Return a task that is trained with SGD."""
    optimizer = torch.optim.SGD(net.parameters(), args.lr)
    return ddp.Task(train_set, val_set, net, optimizer, **options)


def sgd_task(args, device):
    """A task whose net has no BatchNorm, so that each sample is treated by itself."""
    data = ddp.SyntheticDataset(44, 64), ddp.SyntheticDataset(25, 64, 1)
    return with_sgd(args, *data, plain_net())


def telling_task(args, device):
    """A task whose net prints, in each forward, whether it trains and what its logits are.

    Four words: training, dtype, requires_grad, is_inference.
    """

    def tell(net, args, logits):
        print(net.training, logits.dtype, logits.requires_grad, logits.is_inference())

    def telling_sums(logits, y):
        print("loss in autocast:", torch.is_autocast_enabled("cpu"))
        return ddp.batch_sums(logits, y)

    task = sgd_task(args, device)
    task.module.register_forward_hook(tell)
    return dataclasses.replace(task, batch_sums=telling_sums)


def assert_close(actual, expected):
    """Assert that numbers or tensors are equal but for the rounding of float32."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def task_of(label, num_val_samples, args, device):
    """A task of 8 samples with the same label at each position."""
    data = [(torch.randn(3, 8), torch.full((8,), label))] * 8
    return with_sgd(args, data, data[:num_val_samples], ddp.ConvNet())


class Test(unittest.TestCase):
    """A test case with a folder of its own."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)

    def assert_learned(self, out):
        """Assert that the accuracy at the end is not that of guessing, 1 / 3."""
        self.assertGreater(float(re.findall(r"val_accuracy (\S+)", out)[-1]), 0.8)

    @classmethod
    def write(cls, text, name="my_job"):
        """Write a program, and return its path."""
        path = cls.folder / f"{name}.py"
        path.write_text(text)
        return str(path)

    @classmethod
    def script(cls, change, name="my_job"):
        """Write a program that changes ddp_reference, or has a my_task, and calls its main.

        run(self.script("ddp.train = print")) runs a job whose ranks only print.
        """
        text = f"""
import os, signal, sys
import torch
import torch.distributed as dist
import ddp_reference as ddp
my_task = ddp.make_task
{change}
if __name__ == "__main__":
    sys.exit(ddp.main(sys.argv[1:], my_task))
"""
        return cls.write(text, name)


# ---- The sampler
def indices_of_ranks(num_replicas, n, start=0, **options):
    """Return the indices that each rank reads in epoch 3."""
    ranks = []
    for rank in range(num_replicas):
        sampler = ddp.DistributedSampler(range(n), num_replicas, rank, **options)
        sampler.set_epoch(3, start)
        ranks.append(list(sampler))
        assert len(sampler) == len(ranks[-1])
    return ranks


def in_turns(ranks):
    """Return the indices of all ranks, from each one in turn."""
    turns = itertools.zip_longest(*ranks)
    return [index for turn in turns for index in turn if index is not None]


class TheSampler(unittest.TestCase):
    def test_pytorchs_int32_and_int64_permutations_are_the_same(self):
        for n in (10, 100_003, 3_000_000):
            torch.manual_seed(n)
            int32 = torch.randperm(n, dtype=torch.int32)
            torch.manual_seed(n)
            int64 = torch.randperm(n)

            self.assertTrue(torch.equal(int32, int64))

    def test_without_a_global_batch_any_start_leaves_the_rest_padded_as_torch_does(self):
        for n, ranks, shuffle in itertools.product((1, 7, 24), range(1, 7), (True, False)):
            [order] = indices_of_ranks(1, n, shuffle=shuffle)
            for start in range(n + 1):
                left = order[start:]
                divisible = len(left) // ranks * ranks
                repeated = (order * 7)[: -len(left) % ranks]  # of one sample perhaps 5
                read = functools.partial(indices_of_ranks, ranks, n, start, shuffle=shuffle)

                self.assertEqual(in_turns(read()), left + repeated)
                self.assertEqual(in_turns(read(drop_last=True)), left[:divisible])

    def test_a_second_pass_without_set_epoch_warns_with_the_remedy(self):
        sampler = ddp.DistributedSampler(range(5), 2, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for epoch in range(3):
                sampler.set_epoch(epoch)
                list(sampler)  # no warning

        with self.assertWarnsRegex(UserWarning, r"call set_epoch\(epoch\)") as warning:
            list(sampler)
        self.assertEqual(warning.filename, __file__)

    def test_it_takes_four_bytes_a_sample_for_a_moment_and_then_its_own_part(self):
        indices = iter(ddp.DistributedSampler(range(1_000_000), 8, 3))

        with profile(profile_memory=True) as profiler:
            next(indices)

        taken = [event.self_cpu_memory_usage for event in profiler.function_events]
        self.assertEqual(max(taken), 4_000_000)
        self.assertEqual(sum(taken), 500_000)  # This it keeps.

    def test_it_makes_no_list_of_all_its_indices(self):
        indices = iter(ddp.DistributedSampler(range(1_000_000), 1, 0))
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)

        first = next(indices)

        self.assertIs(type(first), int)
        self.assertLess(tracemalloc.get_traced_memory()[1], 1_000_000)  # the list: 36 million bytes

    def test_a_rank_out_of_range_is_an_error_that_says_so(self):
        for rank in (-1, 2):
            with self.assertRaisesRegex(ValueError, f"rank {rank} is not one of 2"):
                ddp.DistributedSampler(range(5), 2, rank)

    def test_a_start_out_of_range_is_an_error_that_says_so(self):
        for start in (-1, 6):
            with self.assertRaisesRegex(ValueError, rf"start is {start}, but must be in \[0, 5\]"):
                ddp.DistributedSampler(range(5), 2, 0).set_epoch(0, start)


# ---- The task
def task_args(options=""):
    """Return the options of a command line."""
    return ddp.make_parser().parse_args(options.split())


def seeds_of_task(options):
    """Return the seeds of the training and of the validation data."""
    task = ddp.make_task(task_args(options), CPU)
    return task.train_set.seed, task.val_set.seed


class TheTask(unittest.TestCase):
    def test_an_item_depends_on_seed_and_index_alone_also_in_loader_workers(self):
        items = list(DataLoader(ddp.SyntheticDataset(6, 50, seed=1), None, num_workers=2))

        longer = ddp.SyntheticDataset(100, 50, seed=1)
        torch.testing.assert_close(items, [longer[i] for i in range(6)], rtol=0, atol=0)

    def test_items_differ_by_index_and_by_seed(self):
        zero, one = ddp.SyntheticDataset(2, 50, 0), ddp.SyntheticDataset(2, 50, 1)

        sums = {x.sum().item() for x, _ in (zero[0], zero[1], one[0])}

        self.assertEqual(len(sums), 3)

    def test_y_is_the_channel_of_x_with_the_largest_moving_sum(self):
        x, y = ddp.SyntheticDataset()[99]

        expected = F.avg_pool1d(x, 3, stride=1, padding=1).argmax(0)
        self.assertEqual((x.shape, x.dtype), ((3, 10000), torch.float32))
        self.assertTrue(torch.equal(y, expected))  # int64, too

    def test_training_and_validation_data_differ(self):
        self.assertEqual(on_ranks(1, seeds_of_task, "--seed 3"), [(3, 4)])

    def test_an_index_out_of_range_is_an_index_error(self):
        for index in (-1, 100):
            with self.assertRaises(IndexError):
                ddp.SyntheticDataset()[index]

    def test_the_net_gives_logits_for_every_class_and_position_also_negative_ones(self):
        logits = ddp.ConvNet(num_classes=5)(torch.randn(2, 3, 11))

        self.assertEqual(logits.shape, (2, 5, 11))
        self.assertLess(logits.min(), 0)


# ---- The step
def uneven_batch():
    """Return 12 samples with unequally many labels."""
    return default_collate(uneven_data(12))


def wrapped_net(make_net=plain_net):
    """Return a net in DistributedDataParallel, with BatchNorm over the job, and an optimizer."""
    net = make_net()
    ddp.sync_batch_norm(net)
    model = DistributedDataParallel(net)
    return model, torch.optim.SGD(model.parameters(), lr=1)


def masked_loss(logits, y):
    """A loss that makes ignored labels zero by a mask."""
    return (logits.sum(1) * (y != -100)).sum(), torch.zeros(())


def step_with_masked_loss(x, y):
    """Make a step with a loss that makes ignored labels zero by a mask."""
    return step_on_a_share(x, y, 3, batch_sums=masked_loss)


def events_of_a_step(micro_batch_size, make_net=plain_net):
    """Return the names of all that PyTorch's profiler sees in a step on 12 samples."""
    model, optimizer = wrapped_net(make_net)
    micro_batches = share_of_rank(*uneven_batch(), micro_batch_size)
    with profile() as profiler:
        ddp.train_step(model, optimizer, micro_batches, seed=(0,), clip_grad_norm=1)
    return [event.name for event in profiler.function_events]


class RandomStep(torch.optim.SGD):
    """An optimizer that moves every parameter at random."""

    def step(self):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter += torch.rand_like(parameter)


def random_step():
    """Make a step with dropout and a random optimizer: return (dropout's output, parameters)."""
    outputs = []
    net = nn.Sequential(nn.Dropout(), plain_net())
    net[0].register_forward_hook(lambda layer, args, output: outputs.append(output))
    model = DistributedDataParallel(net)
    x, y = torch.ones(1, 3, 40), torch.zeros(1, 40, dtype=torch.int64)
    optimizer = RandomStep(net.parameters())
    ddp.train_step(model, optimizer, [(x, y)], seed=(0,))
    return outputs[0], nn.utils.parameters_to_vector(net.parameters()).detach()


def draws_of_a_step():
    """Return what the net and the optimizer draw in a step."""
    draws, net = [], plain_net()
    optimizer = torch.optim.SGD(net.parameters())
    net.register_forward_hook(lambda layer, args, output: draws.append(torch.rand(4)))
    optimizer.register_step_pre_hook(lambda *args: draws.append(torch.rand(4)))
    micro_batches = share_of_rank(*uneven_batch(), 12)
    ddp.train_step(DistributedDataParallel(net), optimizer, micro_batches, seed=(3, 4))
    return draws


def memory_of_gradients():
    """Return where the gradients are before and after a step of two micro-batches."""
    model, optimizer = wrapped_net()
    model = DistributedDataParallel(model.module, gradient_as_bucket_view=True)
    micro_batches = share_of_rank(*uneven_batch(), 6)
    places = []
    for _ in range(4):  # DDP decides on its buckets after the first.
        ddp.train_step(model, optimizer, micro_batches, seed=(0,))
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    return places[2:]


class TheStep(unittest.TestCase):
    """Every rank ends a step with the parameters of one process that had the whole batch."""

    def test_without_any_label_it_changes_nothing(self):
        x, y = uneven_batch()
        y[:] = -100
        unchanged = list(plain_net().parameters()), torch.zeros(3, dtype=torch.float64)

        for step in on_ranks(2, step_with_masked_loss, x, y):
            assert_close(step, unchanged)

    def test_dropout_differs_between_ranks_and_an_optimizers_random_numbers_do_not(self):
        (mask, parameters), (other_mask, other_parameters) = on_ranks(2, random_step)

        self.assertFalse(torch.equal(mask, other_mask))
        self.assertTrue(torch.equal(parameters, other_parameters))

    def test_an_optimizer_does_not_draw_what_the_net_has_drawn(self):
        [(of_net, of_optimizer)] = on_ranks(1, draws_of_a_step)

        self.assertFalse(torch.equal(of_net, of_optimizer))

    def test_gradients_stay_in_the_memory_in_which_they_are_all_reduced(self):
        [(before, after)] = on_ranks(1, memory_of_gradients)

        self.assertEqual(before, after)

    def test_ranks_all_reduce_labels_and_gradients_once_in_a_step(self):
        for micro_batch_size in (12, 5, 1):
            for events in on_ranks(2, events_of_a_step, micro_batch_size):
                self.assertEqual(events.count("c10d::allreduce_"), 2)  # labels, gradients

    def test_it_calls_no_item_and_no_mask_which_would_wait_for_the_device(self):
        [events] = on_ranks(1, events_of_a_step, 5)

        self.assertIn("aten::convolution_backward", events)
        self.assertEqual({"aten::item", "aten::nonzero", "aten::index"} & set(events), set())


class TheEvaluation(unittest.TestCase):
    """It reads each sample once, on however many ranks."""

    def test_a_rank_without_a_sample_takes_part(self):
        task = functools.partial(task_of, 0, 1)

        self.assertIn("epoch 0 | loss", on_ranks(2, job, "--epochs 1", task)[0].out)

    def test_without_any_sample_it_gives_nan(self):
        self.assertTrue(np.isnan(on_ranks(1, evaluation, 0)).all())

    def test_it_makes_no_graph_and_no_inference_tensors(self):
        out = on_ranks(1, job, SMALL, telling_task)[0].out

        self.assertIn("False torch.float32 False False\n", out)

    def test_the_digest_covers_parameters_and_buffers(self):
        module = net_of_rank()
        digests = {ddp.digest(module)}

        for tensor in module.state_dict().values():
            tensor[(-1,) * tensor.dim()] += 1  # the last number
            digests.add(ddp.digest(module))

        self.assertEqual(len(digests), 1 + 4 + 5)  # of the convolutions, of BatchNorm


def single_value():
    """Return what a single sample of features becomes, and the running statistics."""
    net = nn.Sequential(nn.BatchNorm1d(3))
    ddp.sync_batch_norm(net)
    ddp.SyncBatchNorm.is_stand_in = False
    return net(torch.ones(1, 3)).detach(), net[0].running_mean, net[0].running_var


class LayerOfItsOwn(nn.BatchNorm1d):
    """A BatchNorm that does more."""

    def forward(self, x):
        return super().forward(x) + 1


class TheBatchNorm(unittest.TestCase):
    """Over all ranks it is one nn.BatchNorm over the whole global batch."""

    def test_a_single_value_becomes_0_and_a_variance_of_0(self):
        [(output, mean, var)] = on_ranks(1, single_value)

        expected = torch.zeros(1, 3), torch.full((3,), 0.1), torch.full((3,), 0.9)
        assert_close((output, mean, var), expected)

    def test_a_layer_keeps_parameters_names_and_hooks_and_in_eval_mode_its_output(self):
        net, x = net_with_batch_norm(), torch.randn(2, 3, 2, 2)
        net[0].register_forward_hook(lambda layer, args, output: output + 1)
        before = net.state_dict()
        expected = net.eval()(x)

        ddp.sync_batch_norm(net)

        self.assertIs(type(net[3]), ddp.SyncBatchNorm)
        self.assertEqual(list(net.state_dict()), list(before))
        self.assertTrue(torch.equal(net(x), expected))

    def test_layers_that_do_more_or_keep_no_statistics_stay_as_they_are(self):
        net = nn.Sequential(LayerOfItsOwn(3), nn.BatchNorm1d(3, track_running_stats=False))

        ddp.sync_batch_norm(net)

        self.assertEqual([type(layer) for layer in net], [LayerOfItsOwn, nn.BatchNorm1d])

    def test_local_bn_leaves_each_rank_its_own_statistics(self):
        one, two = (on_ranks(ranks, job, f"{SMALL} --local-bn")[0] for ranks in (1, 2))

        self.assertNotEqual(epochs_of(one.out), epochs_of(two.out))

    def test_a_step_makes_two_collectives_a_layer_and_no_wait_for_the_device(self):
        [events] = on_ranks(1, events_of_a_step, 12, ddp.ConvNet)

        self.assertEqual(events.count("c10d::allgather_"), 3)
        self.assertEqual(events.count("c10d::allreduce_"), 3 + 2)
        self.assertEqual({"aten::item", "aten::nonzero", "aten::index"} & set(events), set())


# ---- The number of GPUs changes the time, not the training
def uneven_task(args, device):
    """A net without BatchNorm, and samples with unequally many labels."""
    return with_sgd(args, uneven_data(args.num_samples), ddp.SyntheticDataset(25, 40), plain_net())


class Augmented(ddp.SyntheticDataset):
    """Signals with numbers added that all three generators draw."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(()) + np.random.rand() + random.random(), y


def augmented_task(args, device):
    """The shipped net on augmented data, also to evaluate on."""
    task = ddp.make_task(args, device)
    task.train_set, task.val_set = Augmented(44, 64), Augmented(25, 64)
    return task


def augmented_task_without_batch_norm(args, device):
    """Augmented data, and a net that does not change with what it sees."""
    return with_sgd(args, Augmented(44, 64), Augmented(25, 64), plain_net())


def seeds_of_steps(options):
    """Return the seed of each step of a job."""
    seeds = []

    def noting_step(model, optimizer, micro_batches, seed, *args, **options):
        seeds.append(seed)
        return torch.zeros(3) + 1

    with mock.patch.object(ddp, "train_step", noting_step):
        job(options)
    return seeds


def draw_of_each_generator(args, device):
    """Return what PyTorch, NumPy and Python draw where a task is made."""
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


def drawn_by(make_task):
    """Return what a function draws that train() calls to make the task."""
    try:
        ddp.train(
            task_args(), CPU, lambda args, device: drawn.append(make_task(args, device)), None
        )
    except AttributeError:  # It is no task.
        return drawn.pop()


drawn = []


def scheduled_task(args, device):
    """A task with a schedule, two param groups and a collate_fn of its own."""
    net = plain_net()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]
    return ddp.Task(
        ddp.SyntheticDataset(44, 64),
        ddp.SyntheticDataset(25, 64, 1),
        net,
        torch.optim.SGD(groups, args.lr),
        lr_factor=factor_of_epochs,
        collate_fn=halved,
    )


def factor_of_epochs(epochs):
    """A schedule: up during the first epoch, then down."""
    return np.minimum(epochs + 0.1, 2.2 - epochs)  # NumPy's numbers are not saved.


def halved(samples):
    """A collate_fn that halves x."""
    x, y = default_collate(samples)
    return x / 2, y


def scheduled_plain_loop():
    """Return the parameters that scheduled_task must have, from a loop in plain PyTorch."""
    net = plain_net()
    data = ddp.SyntheticDataset(44, 64)
    sampler = TorchSampler(data, 1, 0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loader = DataLoader(data, 8, sampler=sampler, collate_fn=halved)
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(net(x), y)
            net.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            factor = factor_of_epochs(epoch + 8 * step / 44)
            for layer, lr in ((net[0], 0.5), (net[2], 0.3)):
                torch.optim.SGD(layer.parameters(), lr * factor).step()
    return net.state_dict()


class TheNumberOfRanks(Test):
    def assert_same(self, trained, expected):
        """Assert that jobs on other numbers of ranks have the same epochs and parameters."""
        self.assertEqual(epochs_of(trained.out), epochs_of(expected.out))
        assert_close(trained.state_dict, expected.state_dict)

    def test_a_net_without_batch_norm_trains_the_same_with_any_micro_batch(self):
        # The last step of an epoch has 1 or 4 samples, in place of 12; or 11, and is dropped.
        for more in ("--num-samples 37", "--num-samples 100", "--num-samples 47 --drop-last"):
            options = f"--global-batch-size 12 --epochs 2 --lr 0.5 {more} --micro-batch-size "
            expected = on_ranks(1, job, options + "12", uneven_task)[0]

            for world_size, micro_batch_size in ((1, 5), (3, 4), (5, 1)):
                with self.subTest(more, world_size=world_size):
                    options_here = f"{options}{micro_batch_size}"
                    self.assert_same(
                        on_ranks(world_size, job, options_here, uneven_task)[0], expected
                    )

    def test_with_batch_norm_it_is_the_same_where_ranks_times_micro_batch_is(self):
        options = f"{SMALL} --global-batch-size 12 --micro-batch-size"

        self.assert_same(on_ranks(2, job, f"{options} 3")[0], on_ranks(3, job, f"{options} 2")[0])

    def test_so_it_is_with_a_last_step_of_fewer_micro_batches(self):
        options = "--num-samples 26 --length 64 --epochs 2 --global-batch-size 12"

        two = on_ranks(2, job, f"{options} --micro-batch-size 3")[0]
        three = on_ranks(3, job, f"{options} --micro-batch-size 2")[0]

        self.assert_same(three, two)
        self.assertEqual([len(step) for step in two.labels], [2, 2, 1] * 2)

    def test_augmentation_is_the_same_on_any_number_of_ranks_and_loader_workers(self):
        options = "--length 64 --epochs 2 --num-workers"
        expected = on_ranks(1, job, f"{options} 0", augmented_task)[0]

        for world_size, num_workers in ((1, 2), (3, 0), (5, 0)):
            with self.subTest(world_size=world_size, num_workers=num_workers):
                trained = on_ranks(world_size, job, f"{options} {num_workers}", augmented_task)[0]
                self.assert_same(trained, expected)

    def test_augmentation_is_another_in_each_epoch_of_training_but_not_of_evaluation(self):
        options = "--global-batch-size 44 --epochs 2 --lr 0"
        trained = on_ranks(1, job, options, augmented_task_without_batch_norm)[0]

        first, second = re.findall(r"val_loss \S+", trained.out)
        self.assertEqual(first, second)
        [[first], [second]] = trained.x_sums
        self.assertGreater(abs(first - second), 1)

    def test_augmentation_is_another_for_each_item_and_seed(self):
        def drawn(seed, index):
            x, _ = ddp.SeededItems(Augmented(4, 8), seed)[index]
            plain_x, _ = ddp.SyntheticDataset(4, 8)[index]
            return round((x - plain_x)[0, 0].item(), 4)

        self.assertEqual(len({drawn(0, 2), drawn(1, 2), drawn(0, 3)}), 3)

    def test_each_step_of_each_job_has_a_seed_of_its_own(self):
        seeds = []
        for seed in (0, 1):
            seeds += on_ranks(1, seeds_of_steps, f"{SMALL} --seed {seed}")[0]

        self.assertEqual(len(set(seeds)), 2 * 2 * 2)  # jobs, epochs, steps

    def test_whatever_a_task_draws_is_the_same_on_all_ranks(self):
        one, other = on_ranks(2, drawn_by, draw_of_each_generator)

        self.assertEqual(one, other)

    def test_schedule_and_clipping_are_those_of_a_plain_loop_also_resumed_on_5_ranks(self):
        options = "--global-batch-size 8 --epochs 2 --lr 0.3 --clip-grad-norm 0.05"
        resuming = f"{options} --checkpoint-every 1 --checkpoint {self.folder}/scheduled"
        expected = scheduled_plain_loop()

        on_1 = on_ranks(1, job, options, scheduled_task)[0]
        on_3 = on_ranks(3, job, resuming, scheduled_task, stop_at=4)[0]
        on_5 = on_ranks(5, job, resuming, scheduled_task)[0]

        assert_close(on_1.state_dict, expected)
        assert_close(on_5.state_dict, expected)
        self.assertEqual((len(on_3.labels), len(on_5.labels)), (3, 9))

    def test_going_on_with_another_global_batch_size_is_said(self):
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {self.folder}/batch.pt"
        on_ranks(2, job, f"{options} --global-batch-size 8", stop_at=3)[0]

        out = on_ranks(2, job, f"{options} --global-batch-size 4")[0].out

        self.assertIn("epoch 0, 16 samples read\nuntil now the global batch size was 8\n", out)


# ---- On the same number of ranks, the same bits
class Regularised(nn.Sequential):
    """A net with dropout and a layer that only training uses."""

    def forward(self, x):
        body, head = self
        logits = body(x)
        if self.training:
            logits = logits + F.dropout(head(x), 0.3)
        return logits


def random_task(args, device):
    """A task that draws random numbers, for each sample and in each step."""
    net = Regularised(nn.Conv1d(3, 3, 3, padding=1), nn.Conv1d(3, 3, 1))
    return with_sgd(args, Augmented(44, 8), ddp.SyntheticDataset(4, 8), net)


class Counting(torch.optim.SGD):
    """An optimizer that counts its first two steps in its param group, and makes them smaller."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.param_groups[0]["steps"] = 0

    def step(self):
        [group] = self.param_groups
        group["steps"] = min(group["steps"] + 1, 2)
        group["lr"] /= group["steps"]
        super().step()


def counting_task(args, device):
    """A task with an optimizer that keeps its progress in its param group."""
    task = sgd_task(args, device)
    task.optimizer = Counting(task.module.parameters(), args.lr)
    return task


class AfterAStop(Test):
    """Jobs that end before one of their steps, each of which is saved, and go on."""

    def assert_same_bits(self, world_size, stops, task):
        """Compare a job with one that is stopped before these of its steps."""
        options = f"{SMALL} --global-batch-size {2 * world_size}"
        expected = on_ranks(world_size, job, options, task)[0].out
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/{self.id()}"

        out = ""
        for stop_at in (*stops, None):
            out += on_ranks(world_size, job, options, task, stop_at)[0].out

        self.assertEqual(out.count("resuming from"), len(stops))
        self.assertEqual(epochs_of(out), epochs_of(expected))
        self.assertEqual(digest_of(out), digest_of(expected))

    def test_a_job_with_dropout_and_augmentation_ends_as_the_uninterrupted_one(self):
        self.assert_same_bits(3, stops=(3, 5), task=random_task)

    def test_a_job_whose_optimizer_counts_its_steps_ends_as_the_uninterrupted_one(self):
        self.assert_same_bits(2, stops=(3, 3), task=counting_task)

    def test_a_finished_job_is_not_trained_again(self):
        options = f"{SMALL} --checkpoint {self.folder}/finished.pt"
        first = on_ranks(2, job, options)[0]

        again = on_ranks(2, job, options)[0]

        self.assertEqual(epochs_of(again.out), [])
        self.assertEqual(digest_of(again.out), digest_of(first.out))


# ---- The checkpoint
def infinite_loss(logits, y):
    """A loss that is infinite, while its gradients are zero."""
    return 0 * logits.sum() + float("inf"), torch.zeros(())


def loss_without_finite_gradient(logits, y):
    """A loss of zero, whose gradients are not numbers."""
    return (0 * logits.sum()).sqrt(), torch.zeros(())


def task_with_loss(batch_sums, args, device):
    """The shipped task with another loss."""
    return dataclasses.replace(ddp.make_task(args, device), batch_sums=batch_sums)


def task_in_other_order(args, device):
    """The shipped task, whose optimizer has the first two parameters in the other order."""
    task = ddp.make_task(args, device)
    first, second, *others = task.module.parameters()
    return dataclasses.replace(task, optimizer=torch.optim.Adam([second, first, *others]))


def job_in_a_folder_of_its_own(folder, options):
    """Run a job whose ranks are in other folders."""
    before = os.getcwd()
    os.chdir(f"{folder}/{dist.get_rank()}")
    try:
        return job(options)
    finally:
        os.chdir(before)


def decay_after_resuming(path):
    """Save a job without weight decay and resume it with 0.5: return the weight decay then."""
    args = task_args(f"--checkpoint {path}")
    saved, resumed = sgd_task(args, CPU), sgd_task(args, CPU)
    resumed.optimizer.param_groups[0]["weight_decay"] = 0.5
    identity = ddp.identify(saved, args)
    base_groups = saved.optimizer.state_dict()["param_groups"]
    ddp.save_job(identity, saved, base_groups, (0, 0, torch.zeros(3)), args)
    ddp.resume(identity, resumed, args)
    return resumed.optimizer.param_groups[0]["weight_decay"]


class TheCheckpoint(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.options = f"{SMALL} --global-batch-size 8 --checkpoint-every 1 --checkpoint"
        cls.path = cls.folder / "first"
        on_ranks(2, job, f"{cls.options} {cls.path}", stop_at=3)[0]
        cls.saved = torch.load(cls.path)

    def refusal(self, path, more=""):
        """Return the error with which all ranks of a job refuse a checkpoint."""
        first, second = on_ranks(2, error_of_job, f"{self.options} {path} {more}")
        self.assertEqual(first, second)
        return first

    def refusal_of_changed(self, **changes):
        """Return the error for a copy of a good checkpoint with these changes."""
        torch.save(self.saved | changes, self.folder / "changed")
        return self.refusal(self.folder / "changed")

    def test_a_kill_while_it_is_written_leaves_the_old_one(self):
        path, seen = self.folder / "killed", []
        ddp.save_checkpoint(path, {"state": "old"})

        def look(*args):
            seen.append(torch.load(path))  # what a kill at this moment would leave

        for moment in ("replace", "fsync"):
            with mock.patch.object(os, moment, look):
                ddp.save_checkpoint(path, {"state": "new"})

        self.assertEqual(seen, [{"state": "old"}, {"state": "old"}])

    def test_through_a_link_the_file_is_written(self):
        link, path = self.folder / "link", self.folder / "file"
        link.symlink_to(path)

        ddp.save_checkpoint(link, {"state": "new"})

        self.assertEqual(torch.load(path), {"state": "new"})

    def test_a_write_that_fails_leaves_no_other_file(self):
        path = self.folder / "full"
        ddp.save_checkpoint(path, {"state": "old"})

        with mock.patch.object(os, "fsync", side_effect=OSError("disk full")):
            self.assertRaisesRegex(OSError, "disk full", ddp.save_checkpoint, path, {})

        self.assertEqual(list(self.folder.glob("full*")), [path])

    def test_two_writers_at_once_do_not_disturb_each_other(self):
        path = self.folder / "both"

        def write_another(file):
            with mock.patch.object(os, "fsync"):
                ddp.save_checkpoint(path, {"state": "of the other"})

        with mock.patch.object(os, "fsync", write_another):
            ddp.save_checkpoint(path, {"state": "of the slow one"})

        self.assertEqual(torch.load(path), {"state": "of the slow one"})

    def test_only_rank_0_needs_to_see_it_and_only_rank_0_writes_it(self):
        for rank in ("0", "1"):
            (self.folder / rank).mkdir()
        shutil.copy(self.path, self.folder / "0" / "seen")

        first, second = on_ranks(2, job_in_a_folder_of_its_own, self.folder, f"{self.options} seen")

        self.assertIn("16 samples read", first.out)
        torch.testing.assert_close(first.state_dict, second.state_dict, rtol=0, atol=0)
        self.assertEqual(list((self.folder / "1").iterdir()), [])

    def test_a_file_that_is_no_checkpoint_is_refused_and_left_as_it_is(self):
        whole, path = self.path.read_bytes(), self.folder / "bad"
        for content in (b"", b"no checkpoint", whole[:5000], whole[:-1]):
            path.write_bytes(content)

            self.assertRegex(self.refusal(path), "^InputError: .*/bad is damaged or not a")
            self.assertEqual(path.read_bytes(), content)

    def test_one_of_another_job_is_refused_with_the_difference(self):
        for option, known in (
            ("--num-samples 99", "the number of samples is 44"),
            ("--length 99", "--length is 64"),
            ("--seed 99", "--seed is 0"),
        ):
            self.assertIn(f"{known} there, but 99 here", self.refusal(self.path, option))

    def test_one_that_has_another_net_or_optimizer_is_refused_with_the_difference(self):
        for name, value, here in (
            ("the shape of 6.weight", [5, 32, 3], [3, 32, 3]),
            ("the optimizer", "SGD", "Adam"),
            ("the dataset", "list", "SyntheticDataset"),
            ("the name of no parameter", 1, None),
        ):
            message = self.refusal_of_changed(identity=self.saved["identity"] | {name: value})
            self.assertIn(f"{name} is {value} there, but {here} here", message)

    def test_one_whose_optimizer_has_its_parameters_in_another_order_is_refused(self):
        error = on_ranks(1, error_of_job, f"{self.options} {self.path}", task_in_other_order)[0]

        self.assertIn("parameter 0 of the optimizer's group 0 is 0.weight there, but 1.w", error)

    def test_one_that_lacks_a_name_of_this_job_is_refused(self):
        saved = dict(self.saved["identity"])
        del saved["the shape of 7.bias"]

        message = self.refusal_of_changed(identity=saved)

        self.assertIn("the shape of 7.bias is None there, but [3] here", message)

    def test_another_file_of_tensors_is_refused(self):
        for content in ({"0.weight": torch.zeros(3)}, torch.zeros(3)):
            torch.save(content, self.folder / "weights")

            self.assertIn("weights holds something else", self.refusal(self.folder / "weights"))

    def test_what_could_not_be_read_again_is_not_written(self):
        path = self.folder / "unreadable"
        ddp.save_checkpoint(path, {"state": "old"})

        with self.assertRaisesRegex(pickle.UnpicklingError, "numpy"):
            ddp.save_checkpoint(path, {"state": np.float64(1)})

        self.assertEqual(ddp.load_checkpoint(path), {"state": "old"})

    def test_a_folder_in_which_nothing_can_be_written_is_refused_before_the_first_step(self):
        for path in ("/proc/ck", f"{self.folder}/none/ck", ""):
            message = on_ranks(1, error_of_job, f"{SMALL} --checkpoint={path}")[0]
            self.assertRegex(message, f"^InputError: --checkpoint {path}: \\w+")

    def test_a_job_that_finds_none_says_so(self):
        out = on_ranks(2, job, f"{SMALL} --checkpoint {self.folder}/none.pt")[0].out

        self.assertEqual(out.count(f"there is no checkpoint {self.folder}/none.pt yet\n"), 1)

    def test_it_is_written_after_each_of_so_many_steps(self):
        options = f"{SMALL} --global-batch-size 8 --checkpoint-every 2"
        options += f" --checkpoint {self.folder}/every-2"
        on_ranks(1, job, options, stop_at=4)[0]

        self.assertIn("epoch 0, 16 samples read", on_ranks(1, job, options)[0].out)

    def test_one_that_would_execute_something_does_not(self):
        folder = self.folder / "executed"

        class Evil:
            def __reduce__(self):
                return os.makedirs, (str(folder), 0o777, True)

        self.assertIn("UnpicklingError", self.refusal_of_changed(evil=Evil()))
        self.assertFalse(folder.exists())

    def test_the_learning_rate_is_the_command_lines(self):
        path = shutil.copy(self.path, self.folder / "lr")

        trained = on_ranks(2, job, f"{self.options} {path} --lr 0")[0]

        before, after = self.saved["module"], trained.state_dict
        self.assertEqual(len(trained.labels), 10)  # 12 of two epochs, without the 2 before
        self.assertTrue(torch.equal(before["0.weight"], after["0.weight"]))

    def test_the_weight_decay_is_the_next_command_lines(self):
        [decay] = on_ranks(1, decay_after_resuming, self.folder / "decay")

        self.assertEqual(decay, 0.5)

    def test_a_loss_or_a_net_that_is_not_finite_ends_the_job_and_is_not_saved(self):
        path = self.folder / "finite"
        for loss in (infinite_loss, loss_without_finite_gradient):
            for options in (f"{self.options} {path}", f"{SMALL} --checkpoint {path}"):
                task = functools.partial(task_with_loss, loss)
                for error in on_ranks(2, error_of_job, options, task):
                    self.assertRegex(error, "^FloatingPointError: the loss or a parameter is not")
                self.assertFalse(path.exists())


# ---- The job
def digest_of_a_plain_loop():
    """Return the digest of what a job of one rank trains, written without ddp_reference's loop."""
    torch.manual_seed(7)
    data, module = ddp.SyntheticDataset(44, 64, seed=7), ddp.ConvNet()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    sampler = TorchSampler(data, 1, 0, seed=7)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 4, sampler=sampler):
            loss = F.cross_entropy(module(x), y)
            optimizer.zero_grad()
            loss.backward()  # of 256 labels, a power of 2: no bit differs from a sum / 256
            optimizer.step()
    return ddp.digest(module)


def plain_seed(*numbers):
    """Seed as the plain loop does."""
    torch.manual_seed(numbers[0])


def plainly_seeded_job(options):
    """Run a job that is seeded as the plain loop is."""
    with mock.patch.object(ddp, "seed_generators", plain_seed):
        return job(options)


def job_with_a_clock(options):
    """Return what a rank prints on a terminal where each look at the clock is a second later."""
    seconds, evaluate = itertools.count(), ddp.evaluate

    def slow_evaluate(*args, **options):
        next(seconds)
        return evaluate(*args, **options)

    with (
        mock.patch.object(ddp.time, "perf_counter", lambda: next(seconds)),
        mock.patch.object(ddp, "evaluate", slow_evaluate),
    ):
        return job(options, terminal=True).out


def job_with_1024_files(options):
    """Run a job on 2600 tensors where 1024 files may be open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most[1]))
    try:
        return job(options, task_of_2600_tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


def task_of_2600_tensors(args, device):
    """A task whose data is a list of as many tensors."""
    data = [(torch.randn(3, 8), torch.randint(3, (8,))) for _ in range(1300)]
    return with_sgd(args, data, data[:1], nn.Conv1d(3, 3, 1))


class WrongStream(IterableDataset):
    """A stream that promises 44 samples and gives fewer or more."""

    samples_per_epoch = 44

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def set_epoch(self, epoch, start):
        pass

    def __iter__(self):
        return iter([(torch.zeros(3, 8), torch.zeros(8, dtype=torch.int64))] * self.num_samples)


def task_of_a_wrong_stream(num_samples, args, device):
    """A task that trains on it."""
    return with_sgd(args, WrongStream(num_samples), ddp.SyntheticDataset(4, 8), plain_net())


class NumberedStream(IterableDataset):
    """A stream of 4 samples that hold nothing but their number, from where the job has stopped."""

    samples_per_epoch = 4

    def set_epoch(self, epoch, start):
        self.start = start

    def __iter__(self):
        for number in range(self.start, 4):
            yield torch.full((3, 8), float(number)), torch.zeros(8, dtype=torch.int64)


def task_of_numbers(args, device):
    """A task that trains on it."""
    return with_sgd(args, NumberedStream(), ddp.SyntheticDataset(4, 8), plain_net())


class StreamOfEpochs(IterableDataset):
    """A stream of two samples that hold nothing but the number of the epoch."""

    samples_per_epoch = 2

    def set_epoch(self, epoch, start=0):
        self.epoch = epoch

    def __iter__(self):
        x = torch.full((3, 8), float(self.epoch))
        return iter([(x, torch.zeros(8, dtype=torch.int64))] * 2)


def task_of_epochs(args, device):
    """A task that trains on it."""
    return with_sgd(args, StreamOfEpochs(), ddp.SyntheticDataset(4, 8), plain_net())


def features_task(args, device):
    """A task with BatchNorm on features, which refuses a single sample."""
    data = [(torch.randn(3), torch.tensor(i % 3)) for i in range(8)]
    return with_sgd(args, data, data, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def job_of_unequal_ranks(options, *options_of_ranks):
    """Return the error of a job whose ranks have other options."""
    return error_of_job(f"{options} {options_of_ranks[dist.get_rank()]}")


def refusal_of_ranks(nprocs_per_node, nums_val_samples):
    """Return the error, if any, of ranks whose machines or validation data are unequal."""
    rank = dist.get_rank()
    args = task_args()
    args.nproc_per_node, args.world_size = nprocs_per_node[rank], dist.get_world_size()
    task = task_of(0, nums_val_samples[rank], args, CPU)
    try:
        ddp.refuse_unequal_ranks(ddp.identify(task, args), task, args)
    except ddp.InputError as error:
        return str(error)


class TheJob(Test):
    def test_one_rank_trains_what_a_plain_loop_does(self):
        expected = digest_of_a_plain_loop()

        for parallel in ("ddp", "dp"):
            options = f"{SMALL} --seed 7 --lr 0.02 --global-batch-size 4 --local-bn"
            [trained] = on_ranks(1, plainly_seeded_job, f"{options} --parallel {parallel}")
            self.assertIn(expected, trained.out)

    def test_data_parallel_adds_up_micro_batches_as_ddp_does(self):
        options = f"{SMALL} --local-bn --micro-batch-size 5 --parallel"

        ddp_job, dp_job = (
            on_ranks(1, job, f"{options} {parallel}")[0] for parallel in ("ddp", "dp")
        )

        self.assertEqual(digest_of(dp_job.out), digest_of(ddp_job.out))

    def test_each_option_changes_what_is_trained(self):
        options = (
            "--epochs 2|--global-batch-size 9|--micro-batch-size 1|--lr 0.1|--drop-last|--local-bn|"
            "--amp|--clip-grad-norm 0.01|--seed 1|--num-samples 40|--length 65|"
        )

        digests = {
            digest_of(on_ranks(2, job, f"{SMALL} --epochs 1 {option}")[0].out)[0]
            for option in options.split("|")
        }

        self.assertEqual(len(digests), 12)  # with that of no option, the last

    def test_loss_and_accuracy_are_those_of_all_ranks(self):
        task = sgd_task(types.SimpleNamespace(lr=0), CPU)
        train_set, val_set = task.train_set, task.val_set
        numbers = [
            *loss_and_accuracy(task.module, train_set),
            *loss_and_accuracy(task.module, val_set),
        ]

        out = on_ranks(3, job, f"{SMALL} --lr 0", sgd_task)[0].out

        line = "| loss {:.4f} accuracy {:.3f} | val_loss {:.4f} val_accuracy {:.3f} |"
        self.assertEqual(out.count(line.format(*numbers)), 2)

    def test_amp_runs_training_and_evaluation_in_bfloat16(self):
        out = on_ranks(1, job, f"{SMALL} --amp", telling_task)[0].out

        self.assertNotIn("True torch.float32", out)
        self.assertNotIn("loss in autocast: False", out)
        self.assertIn("False torch.bfloat16", out)

    def test_on_a_terminal_a_progress_line_redraws_itself(self):
        options = f"{SMALL} --global-batch-size 12"
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/clock"
        on_ranks(3, job, options, stop_at=3)[0]

        out, *others = on_ranks(3, job_with_a_clock, options)

        self.assertIn("epoch 0 | 36/44 samples | 12.0 samples/s  \r", out)  # 12 of them now, in 1 s
        self.assertIn("epoch 1 | 44/44 samples | 11.0 samples/s  \r", out)  # in 4 s
        self.assertIn(" | 6.7 samples/s\n", out)  # epoch 0: 20 samples in 3 s
        self.assertIn(" | 8.8 samples/s\n", out)  # epoch 1: 44 samples in 5 s
        self.assertEqual(others, ["", ""])

    def test_loader_workers_take_2600_tensors_where_1024_files_may_be_open(self):
        options = "--epochs 1 --num-workers 1 --global-batch-size 130"

        [trained] = on_ranks(1, job_with_1024_files, options)

        self.assertEqual(len(trained.labels), 10)

    def test_ranks_that_are_not_the_same_job_all_refuse_it_and_say_in_what_they_differ(self):
        for name, here, there in (
            ("--lr", 0.01, 0.02),
            ("--clip-grad-norm", 2.0, 3.0),
            ("the number of samples", 44, 36),
        ):
            option = name.replace("the number of", "--num").replace(" ", "-")
            options = SMALL, f"{option} {here}", f"{option} {here}", f"{option} {there}"
            message = (
                f"InputError: rank 2 is of another job: {name} is {there} there, but {here} here"
            )
            self.assertEqual(on_ranks(3, job_of_unequal_ranks, *options), [message] * 3)

    def test_each_step_and_each_batch_of_evaluation_tells_the_watchdog_that_the_job_goes_on(self):
        trained = on_ranks(1, job, f"{SMALL} --micro-batch-size 10")[0]

        self.assertEqual(trained.resets, 2 * (1 + 2 + 3))  # epochs, steps, batches of 25 samples

    def test_data_that_cannot_be_trained_on_is_refused_by_all_ranks(self):
        for label, num_val_samples, options, message in (
            (0, 0, "", "the validation data has no sample"),
            (-100, 1, "", "nothing to train on"),
            (0, 1, "--global-batch-size 10 --drop-last", "nothing to train on"),
        ):
            task = functools.partial(task_of, label, num_val_samples)
            for error in on_ranks(2, error_of_job, options, task):
                self.assertRegex(error, f"^InputError: {message}")

    def test_with_local_bn_a_net_of_features_trains(self):
        options = "--epochs 1 --local-bn --global-batch-size 4"

        self.assertIn("epoch 0 |", on_ranks(2, job, options, features_task)[0].out)

    def test_a_stream_of_ones_own_learns_of_each_epoch_also_in_loader_workers(self):
        for num_workers in (0, 1):
            options = f"--epochs 2 --global-batch-size 2 --num-workers {num_workers}"

            trained = on_ranks(1, job, options, task_of_epochs)[0]

            self.assertEqual(trained.x_sums, [[0], [48]])

    def test_a_stream_that_does_not_give_what_it_promised_is_an_error(self):
        for num_samples, given in ((30, 6), (48, 24)):
            task = functools.partial(task_of_a_wrong_stream, num_samples)
            [error] = on_ranks(1, error_of_job, "", task)

            self.assertEqual(error, f"ValueError: the loader gave {given} samples of a share of 20")

    def test_a_stream_of_ones_own_goes_on_where_the_job_has_stopped(self):
        options = "--epochs 1 --global-batch-size 1 --checkpoint-every 1"
        options += f" --checkpoint {self.folder}/stream"
        on_ranks(1, job, options, task_of_numbers, stop_at=3)

        [trained] = on_ranks(1, job, options, task_of_numbers)

        self.assertEqual(trained.x_sums, [[2 * 24], [3 * 24]])

    def test_drop_last_drops_no_full_step_and_no_validation_sample(self):
        options = "--num-samples 24 --global-batch-size 12 --epochs 1 --length 64 --lr 0"

        kept, dropped = (on_ranks(1, job, options + more)[0] for more in ("", " --drop-last"))

        self.assertEqual(dropped.labels, [[12 * 64]] * 2)
        self.assertEqual(epochs_of(dropped.out), epochs_of(kept.out))

    def test_machines_may_have_unequally_many_processes_but_not_validation_samples(self):
        self.assertEqual(on_ranks(2, refusal_of_ranks, (1, 2), (4, 4)), [None] * 2)
        for refusal in on_ranks(2, refusal_of_ranks, (2, 2), (4, 5)):
            self.assertIn("rank 1 is of another job: the number of validation samples is", refusal)

    def test_labels_that_are_no_integers_are_refused(self):
        for error in on_ranks(2, error_of_job, "", functools.partial(task_of, 0.5, 1)):
            self.assertRegex(error, "^TypeError: labels must be integers")


# ---- Launching, failing, ending. What script() makes of each of these is a program that can be run
# by hand, beside ddp_reference.py.
RAISE_ON_RANK_1 = """
def train(*args):
    if dist.get_rank() == 1:
        raise ValueError("by a test")
    dist.barrier()
ddp.train = train
"""

REFUSE_ON_RANK_1 = """
def train(*args):
    if dist.get_rank() == 1:
        raise ddp.InputError("by rank 1 alone")
    dist.barrier()
ddp.train = train
"""

SIGNAL_RANK_1 = """
def train(*args):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal_1)
    dist.barrier()
ddp.train = train
"""

SLEEP_IN_A_LOADER_WORKER = """
import time
class Sleeping(ddp.SyntheticDataset):
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info():
            time.sleep(1000)
        return super().__getitem__(index)
def my_task(args, device):
    task = ddp.make_task(args, device)
    task.train_set = Sleeping()
    return task
"""

HANG = """
import threading
def hang_here():
    threading.Event().wait()
watchdog = ddp.Watchdog(3, 1)
watchdog.reset()
hang_here()
"""

KILL_RANK_1_AT_ITS_THIRD_STEP = """
train_step, steps = ddp.train_step, []
def killed_step(*args, **options):
    steps.append(1)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1"
    if len(steps) == 3 and dist.get_rank() == 1 and not restarted:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(*args, **options)
ddp.train_step = killed_step
"""

KILL_A_RANK_WHILE_ITS_LOADER_WORKER_IS_IMPORTED = """
import multiprocessing
if ":" in multiprocessing.current_process().name:  # SpawnProcess-1:1, the first one's first child
    rank = os.getppid()
    os.kill(rank, signal.SIGKILL)
    while os.getppid() == rank:
        pass
"""

TELL_ABOUT_A_RANK_AND_REFUSE = """
import socket
def train(*args):
    addresses = set()
    for fd in map(int, os.listdir("/dev/fd")):
        try:
            opened = socket.socket(fileno=os.dup(fd))
            if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                addresses.add(opened.getsockname()[0])
        except OSError:
            pass  # no socket
    dist.barrier()
    group = torch.distributed.nn.functional.all_reduce.__defaults__[1]
    threads = os.environ["OMP_NUM_THREADS"]
    text = f"{threads} threads, listening on {addresses}, default group {group}\\n"
    os.write(1, text.encode())  # in one piece: ranks share the pipe
    raise ddp.InputError("by a test")
ddp.train = train
if __name__ == "__main__":
    del os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(6)  # as on 6 cores
"""

REFUSE_WITH_THREADS = """
def train(*args):
    raise ddp.InputError(os.environ["OMP_NUM_THREADS"] + os.environ["GLOO_SOCKET_IFNAME"])
ddp.train = train
"""

WAIT_FOR_THE_END_OF_THE_LAUNCHER = """
if __name__ != "__main__":
    launcher = os.getppid()
    print("the rank is being imported", flush=True)
    while os.getppid() == launcher:
        pass
"""


class TheLaunch(Test):
    VERSION = re.escape(torch.__version__)
    REPORT = rf"""^ddp on gloo, world size 2, cpu, global batch size 24, torch {VERSION}
(epoch \d \| loss \d\.\d+ accuracy \d\.\d+ \| val_loss \d\.\d+ val_accuracy \d\.\d+ \| \S+ samples/s
){{6}}parameters sha256 [0-9a-f]{{64}}
$"""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tmpdir = cls.folder / "with # and space"
        cls.tmpdir.mkdir()
        cls.main_job = start(SCRIPT, "--length", 300, TMPDIR=str(cls.tmpdir))
        script = cls.script(KILL_A_RANK_WHILE_ITS_LOADER_WORKER_IS_IMPORTED, "killed")
        cls.killed = start(script, "--nproc-per-node", 1, "--num-workers", 1)

    def test_the_main_job_reports_in_the_agreed_form_that_it_learns(self):
        out, err = finish(self.main_job)

        if "[Gloo]" in out:  # PyTorch 2.9 prints lines of gloo first, one in the other.
            out = out[out.index("ddp on") :]
        self.assertRegex(out, self.REPORT)
        self.assert_learned(out)
        self.assertEqual((err, list(self.tmpdir.glob("tmp*"))), ("", []))

    def test_a_rank_that_is_killed_is_named_and_its_loader_workers_end(self):
        _, err = finish(self.killed, status=1)

        self.assertIn("rank 0 was ended by SIGKILL\n", err)

    def test_ctrl_c_ends_each_of_two_jobs_quietly_also_if_the_launcher_alone_gets_it(self):
        endless = [SCRIPT, *SMALL.split(), "--epochs", 10000, "--nproc-per-node", 1]
        launchers = start(*endless), start(*endless)
        for launcher in launchers * 2:
            launcher.stdout.readline()  # The second line of each says that it trains.
        for launcher, send in zip(launchers, (os.kill, os.killpg), strict=True):
            send(launcher.pid, signal.SIGINT)

            _, err = finish(launcher, status=130)
            self.assertEqual(err, "")

    def test_a_rank_whose_launcher_is_killed_while_it_is_imported_ends(self):
        endless = "--epochs", 1000000, "--nproc-per-node", 1
        launcher = start(self.script(WAIT_FOR_THE_END_OF_THE_LAUNCHER), *endless)
        launcher.stdout.readline()  # The rank is being imported.

        launcher.kill()

        out, _ = finish(launcher, status=-signal.SIGKILL)  # It waits for the rank, too.
        self.assertNotIn("epoch", out)


class TheWatchdog(unittest.TestCase):
    def test_a_step_that_begins_starts_the_seconds_anew(self):
        watchdog, slept = object.__new__(ddp.Watchdog), []
        watchdog.steps_begun = 0

        def sleep(seconds):
            slept.append(seconds)
            if len(slept) <= 10:  # In each of ten seconds a step begins.
                watchdog.reset()

        with (
            mock.patch.object(ddp.time, "sleep", sleep),
            mock.patch.object(os, "_exit"),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            watchdog.wait(rank=0, timeout=3)

        self.assertEqual(slept[:-1], [1] * (10 + 3))


class AHang(Test):
    """Programs that hang or fail, at once: each says where, and ends with all its processes."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        frozen = cls.script("signal_1 = signal.SIGSTOP\n" + SIGNAL_RANK_1, "frozen")
        asleep = cls.script(SLEEP_IN_A_LOADER_WORKER, "asleep")
        timeout = "--timeout", 3, "--nproc-per-node"
        cls.frozen = start(frozen, *timeout, 2)
        cls.asleep = start(asleep, *timeout, 1, "--num-workers", 1)
        cls.hanging = start(cls.script(HANG, "hanging"))
        interrupted = cls.script("signal_1 = signal.SIGINT\n" + SIGNAL_RANK_1, "interrupted")
        cls.interrupted = start(interrupted, "--nproc-per-node", 2)
        cls.raising = start(cls.script(RAISE_ON_RANK_1, "raising"))
        cls.refusing = start(cls.script(REFUSE_ON_RANK_1, "refusing"), "--nproc-per-node", 2)

    def test_the_rank_says_which_it_is_and_at_which_line_in_one_piece(self):
        _, err = finish(self.hanging, status=1)

        self.assertRegex(err, r"^rank 3 has been here for 1 s \(--timeout\):\n(  .*\n)+$")
        self.assertRegex(err, r"line \d+, in hang_here\n    threading.Event\(\).wait\(\)\n")

    def test_a_job_with_a_frozen_rank_ends_and_the_other_rank_says_where_it_waits(self):
        _, err = finish(self.frozen, status=1)

        self.assertRegex(err, r"^rank [01] has been here for 3 s \(--timeout\):\n(  .*\n)+$")

    def test_a_rank_that_raises_ends_the_job_with_its_traceback_first(self):
        _, err = finish(self.raising, status=1)

        self.assertRegex(err, r"(?s)^rank 1 failed:\nTraceback.*\nValueError: by a test\n\n$")
        self.assertEqual(err.count("Traceback"), 1)  # not that of rank 0, which lost rank 1

    def test_sigint_to_one_rank_alone_ends_the_job(self):
        _, err = finish(self.interrupted, status=1)

        self.assertEqual(err, "rank 1 was ended by SIGINT\n")

    def test_a_rank_that_alone_refuses_its_input_says_so_in_one_line(self):
        _, err = finish(self.refusing, status=2)

        self.assertEqual(err, "refusing.py: error: by rank 1 alone\n")

    def test_a_job_with_a_hanging_loader_worker_ends_with_all_its_processes(self):
        _, err = finish(self.asleep, status=1)

        self.assertRegex(err, r"rank 0 has been here for 3 s \(--timeout\):\n  File")


class InTheRanks(Test):
    """A job of two ranks that tell about themselves and then refuse their input."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        script = cls.script(REFUSE_WITH_THREADS, "threads")
        cls.with_threads = start(script, "--nproc-per-node", 1, OMP_NUM_THREADS="3")
        cls.out, cls.err = run(cls.script(TELL_ABOUT_A_RANK_AND_REFUSE), status=2)

    def test_they_share_the_cores(self):
        self.assertEqual(self.out.count("3 threads"), 2)  # each half of 6

    def test_threads_that_the_user_has_set_stay_and_the_interface_is_the_loopback(self):
        _, err = finish(self.with_threads, status=2)

        self.assertEqual(err, f"threads.py: error: 3{LOOPBACK}\n")

    def test_on_one_machine_they_listen_on_the_loopback_address_alone(self):
        self.assertEqual(self.out.count("listening on {'127.0.0.1'}"), 2)

    def test_no_default_argument_of_pytorch_holds_their_group(self):
        self.assertEqual(self.out.count("default group None"), 2)  # pytorch/pytorch#190489

    def test_what_they_refuse_is_one_line_and_the_status_is_2(self):
        self.assertEqual(self.err, "my_job.py: error: by a test\n")


class UnderTorchrun(Test):
    """Three jobs at once: one is killed and restarted, one fails, one has two agents."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        on_2 = [*ONE_MACHINE, "--nproc-per-node=2"]
        script = cls.script(KILL_RANK_1_AT_ITS_THIRD_STEP, "killed")
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {cls.folder}/killed".split()
        can_restart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        cls.killed = start(*on_2, "--max-restarts=1", script, *options, **can_restart)
        cls.failing = start(*on_2, cls.script(RAISE_ON_RANK_1, "failing"))
        store = f"--rdzv-conf=store_type=file --rdzv-endpoint={cls.folder}/store"
        options = f"{store} --rdzv-backend=c10d --nnodes=2 --nproc-per-node=1".split()
        agent = *TORCHRUN, *options, SCRIPT, *SMALL.split()
        cls.agents = [start(*agent, GLOO_SOCKET_IFNAME=LOOPBACK) for _ in range(2)]
        [cls.digest] = digest_of(on_ranks(2, job, SMALL)[0].out)

    def test_a_killed_job_is_restarted_and_ends_as_the_uninterrupted_one(self):
        out, _ = finish(self.killed)

        self.assertIn("resuming from", out)
        self.assertIn(self.digest, out)

    def test_its_report_holds_the_traceback_of_the_cause(self):
        _, err = finish(self.failing, status=1)

        self.assertRegex(err, "(?s)Root Cause.*ValueError: by a test")

    def test_two_agents_train_what_one_launch_does(self):
        out = "".join(finish(agent)[0] for agent in self.agents)

        self.assertIn(self.digest, out)


# ---- Tar shards
def npy(array):
    """Return the bytes of a .npy file."""
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


def tar(*members):
    """Return the bytes of a tar file of members (name, data); without data they are links."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as file:
        for name, data in members:
            member = tarfile.TarInfo(name)
            if data is None:
                member.type = tarfile.SYMTYPE
            else:
                member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return content.getvalue()


def sample_of(number):
    """Return the members of a sample whose x holds nothing but its number."""
    x = np.full((3, 4), number, np.float32)
    return (f"{number:06d}.x.npy", npy(x)), (f"{number:06d}.y.npy", npy(np.zeros(4, int)))


def numbers(samples):
    """Return the numbers of the samples that a stream gives in an epoch, or a loader of it."""
    return [int(x[0, 0]) for x, _ in samples]


class TheShards(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for first in range(0, 22, 5):
            samples = map(sample_of, range(22)[first : first + 5])
            (cls.folder / f"{first:02d}.tar").write_bytes(tar(*itertools.chain(*samples)))

    def stream(self, samples_per_epoch=None, num_replicas=1, rank=0, epoch=0, start=0, **options):
        """Return a stream of 22 samples in 5 shards."""
        ranks = {"num_replicas": num_replicas, "rank": rank}
        stream = ddp.ShardStream([f"{self.folder}/*.tar"], samples_per_epoch, **ranks, **options)
        stream.set_epoch(epoch, start)
        return stream

    def test_members_are_decoded_by_their_names_or_left_as_bytes_or_skipped(self):
        long_key, path = "f/" + "k" * 120, self.folder / "members"
        members = [
            ("a.x.NPY", npy(np.arange(3))),
            ("a.cls", b" 7\n"),
            ("a.meta.json", b'{"b": [1]}'),
            ("a.link.txt", None),
            ("a.txt", "ä".encode()),
            ("README", b"no extension"),
            ("v1.0/b.x.cls", b"1"),
            (f"{long_key}.cls", b"8"),
            (f"{long_key}.jpg", b"\xff"),
        ]
        path.write_bytes(tar(*members))

        first, dotted, second = ddp.read_shard(path)

        self.assertEqual(first.pop("x.npy").tolist(), [0, 1, 2])
        self.assertEqual(dotted, {"__key__": "v1.0/b", "x.cls": 1})
        self.assertEqual(first, {"__key__": "a", "cls": 7, "meta.json": {"b": [1]}, "txt": "ä"})
        self.assertEqual(second, {"__key__": long_key, "cls": 8, "jpg": b"\xff"})

    def read(self, num_replicas, num_workers, samples_per_epoch=None):
        """Return the numbers of the samples that each rank reads in an epoch."""
        ranks = []
        for rank in range(num_replicas):
            stream = self.stream(samples_per_epoch, num_replicas, rank)
            ranks.append(numbers(DataLoader(stream, None, num_workers=num_workers)))
        return ranks

    def test_without_samples_per_epoch_each_sample_is_read_exactly_once(self):
        for num_replicas, num_workers in ((1, 0), (2, 0), (2, 2), (7, 1)):
            read = itertools.chain(*self.read(num_replicas, num_workers))

            self.assertEqual(sorted(read), list(range(22)))

    def steps(self, num_replicas, rank, num_workers, start=0):
        """Return the numbers that a rank reads in each step of 8 samples of an epoch of 44."""
        stream = self.stream(44, num_replicas, rank, start=start, global_batch_size=8)
        share = len(range(rank, 8, num_replicas))
        loader = DataLoader(stream, share, num_workers=num_workers)
        return [numbers(zip(x, y, strict=True)) for x, y in loader]

    def test_ranks_read_their_shares_of_the_same_steps_whatever_their_loader_workers(self):
        for num_replicas, num_workers in ((1, 2), (3, 0), (3, 2), (5, 2)):
            for start, sizes in ((0, [8, 8, 8, 8, 8, 4]), (20, [8, 8, 8])):
                ranks = [
                    self.steps(num_replicas, rank, num_workers, start)
                    for rank in range(num_replicas)
                ]
                turns = itertools.zip_longest(*ranks, fillvalue=[])
                self.assertEqual([sum(map(len, step)) for step in turns], sizes)

    def test_ranks_and_loader_workers_read_different_streams(self):
        workers = set()
        for rank in range(3):
            steps = self.steps(3, rank, 2)
            workers |= {str(steps[0]), str(steps[1])}

        self.assertEqual(len(workers), 6)

    def test_what_is_drawn_depends_on_seed_epoch_and_start(self):
        def draw(**changes):
            return numbers(self.stream(44, 2, 1, **changes))[:20]

        first = draw()

        self.assertEqual(draw(), first)
        for other in (draw(seed=1), draw(epoch=1), draw(start=4)):
            self.assertNotEqual(other, first)

    def test_the_seed_of_the_command_line_reaches_the_shards(self):
        shards = f"--shards {self.folder}/*.tar --val-shards {self.folder}/*.tar"
        options = f"--seed 3 {shards} --samples-per-epoch 4"

        self.assertEqual(on_ranks(1, seeds_of_task, options), [(3, 0)])

    def test_shards_are_sorted_wherever_they_are_listed_and_patterns_are_not(self):
        with mock.patch.object(ddp.glob, "glob", lambda name: [f"{name}2.tar", f"{name}1.tar"]):
            stream = ddp.ShardStream(["b", "a"], num_replicas=1, rank=0)

        self.assertEqual(stream.shards, ["b1.tar", "b2.tar", "a1.tar", "a2.tar"])

    def test_the_headers_of_members_do_not_stay_in_memory(self):
        kept = []

        class Tar(tarfile.TarFile):
            def next(self):
                kept.append(len(self.members))
                return super().next()

        with mock.patch.object(ddp.tarfile, "TarFile", Tar):
            list(ddp.read_shard(self.folder / "00.tar"))

        self.assertLess(max(kept), 2)

    def test_a_pattern_without_a_shard_is_refused(self):
        with self.assertRaisesRegex(ddp.InputError, "there is no shard nowhere"):
            ddp.ShardStream(["nowhere"], num_replicas=1, rank=0)

    def test_a_kept_loader_worker_resumes_a_part_of_an_epoch_and_goes_on(self):
        stream, whole = self.stream(20, start=15), self.stream(40, start=15)
        loader = DataLoader(stream, None, num_workers=1, persistent_workers=True)

        first, second = numbers(loader), numbers(loader)

        self.assertEqual(len(first), 5)
        self.assertEqual(first + second, numbers(whole))

    def test_no_part_of_a_shard_is_out_of_reach_of_short_epochs(self):
        stream = self.stream(3, shuffle_buffer=1)

        read = set()
        for _ in range(60):
            read.update(numbers(stream))

        self.assertEqual(read, set(range(22)))

    def test_the_shuffle_buffer_mixes_samples_of_several_shards(self):
        steps = np.diff(numbers(self.stream(22, shuffle_buffer=15)))

        self.assertLess((steps == 1).sum(), 9)  # In order there are 16 or more.

    def test_the_first_sample_comes_before_the_buffer_is_full(self):
        source = iter(range(100))

        next(ddp.shuffle_endless(source, 50, np.random.default_rng(0)))

        self.assertEqual(next(source), 2)

    def test_a_resumed_job_trains_on_as_many_samples_as_its_epochs_have(self):
        shards = f"{self.folder}/*.tar --val-shards {self.folder}/*.tar --samples-per-epoch 40"
        options = f"--epochs 2 --global-batch-size 8 --shards {shards}"
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/ck"
        on_ranks(3, job, options, stop_at=3)[0]

        ranks = on_ranks(3, job, options)

        steps = zip(*(rank.labels for rank in ranks), strict=True)
        samples = [sum(map(sum, step)) / 4 for step in steps]
        self.assertEqual(samples, [8] * 8)  # after the first 16 of 40

    def test_ranks_without_a_shard_to_evaluate_on_take_part(self):
        shards = f"{self.folder}/*.tar --val-shards {self.folder}/00.tar --samples-per-epoch 12"

        out = on_ranks(3, job, f"--epochs 1 --global-batch-size 12 --shards {shards}")[0].out

        self.assertIn("epoch 0 |", out)

    def test_a_job_with_loader_workers_goes_on_with_its_streams_in_the_next_epoch(self):
        shards = f"{self.folder}/*.tar --val-shards {self.folder}/*.tar --samples-per-epoch 24"
        options = f"--epochs 2 --global-batch-size 12 --shards {shards} --num-workers"

        none, one = (on_ranks(1, job, f"{options} {n}")[0].x_sums for n in (0, 1))

        self.assertEqual(none, one)

    def test_shards_are_drawn_at_random(self):
        shards = ddp.draw_shards(list("abcde"), np.random.default_rng(0))
        drawn = [str(shard) for shard in itertools.islice(shards, 50)]

        self.assertEqual(set(drawn), set("abcde"))
        self.assertNotEqual(drawn[:5], drawn[5:10])

    def test_what_is_no_shard_is_an_error_that_names_file_and_member(self):
        shard, path = (self.folder / "00.tar").read_bytes(), self.folder / "bad"
        for content, message in (
            (b"", "bad, at its end"),
            (bytes(1024), "bad, at its end: .*without a sample"),
            (shard[:600], "bad, 000000.x.npy"),
            (shard[:-10240], "cut off|unexpected end"),
            (shard[:1024] + b"garbage!" * 64 + shard[1536:], "damaged"),
            (tar(sample_of(0)[0]), "bad, 000000: x.npy or y.npy is missing"),
            (tar(("a.npy", npy(np.array([{}])))), "Object arrays cannot"),
            (tar(("a.json", b"[" * 100_000)), "bad, a.json"),
        ):
            path.write_bytes(content)
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                list(ddp.ShardStream([str(path)], num_replicas=1, rank=0))


# ---- The README: what it shows is run, and each part of its table is taken out and used
README = (HERE / "README.md").read_text()


def task_of_script(path, args, device):
    """Return what a script's make_task makes, with the option of its own."""
    args.channels = 4
    return runpy.run_path(path)["make_task"](args, device)


def parts():
    """Return the definitions of each part in the README's table."""
    table = re.search(r"(?s)## Take a part out\n(.*?)\n## ", README)[1]
    rows = re.findall(r"(?m)^\| ([^|`]+) \| ((?:`\w+` ?)+)\|", table)
    return {name: re.findall(r"\w+", definitions) for name, definitions in rows}


def take_out(names):
    """Execute these definitions of the file, and its imports, in an empty module; return it."""
    source = SCRIPT.read_text()
    module = types.ModuleType("part")
    for statement in ast.parse(source).body:
        defined = getattr(statement, "name", None)
        if isinstance(statement, ast.Assign):
            defined = statement.targets[0].id
        if defined in names or isinstance(statement, (ast.Import, ast.ImportFrom)):
            exec(ast.get_source_segment(source, statement), vars(module))
    return module


# What use_...() returns on each of two ranks must be the same for the part and for the whole file.
def use_sampler(module, folder):
    return list(module.DistributedSampler(range(10), global_batch_size=4))


def use_step(module, folder):
    model, optimizer = wrapped_net()
    x, y = uneven_batch()
    share = x[dist.get_rank() :: dist.get_world_size()], y[dist.get_rank() :: dist.get_world_size()]
    [micro_batches] = module.read_steps([share], 0, len(x), len(x), 4, (x[:1], y[:0]))
    sums = module.train_step(model, optimizer, micro_batches, seed=(0,))
    return module.all_reduce_sums(sums), *(p.detach() for p in model.parameters())


def use_evaluate(module, folder):
    return module.evaluate(net_of_rank(), [uneven_batch()], CPU)


def use_batch_norm(module, folder):
    net = net_with_batch_norm()
    module.sync_batch_norm(net)
    return net(torch.arange(24.0).view(2, 3, 2, 2) ** dist.get_rank()).detach()


def use_checkpoint(module, folder):
    path = f"{folder}/{dist.get_rank()}"
    module.save_checkpoint(path, {"rank": dist.get_rank()})
    return module.load_checkpoint(path)


def use_items(module, folder):
    items = module.SeededItems(Augmented(4, 8), 0)
    items.set_epoch(3)
    return items[2]


def use_buckets(module, folder):
    model, _ = wrapped_net(lambda: nn.Sequential(plain_net(), nn.BatchNorm1d(3)))
    module.settle_buckets(model, *uneven_batch())
    return list(model.buffers())


def use_shards(module, folder):
    return numbers(module.ShardStream([f"{folder}/*.tar"], 12))


USES = {
    "the sampler": use_sampler,
    "a step": use_step,
    "evaluation": use_evaluate,
    "BatchNorm over the job": use_batch_norm,
    "checkpoints": use_checkpoint,
    "random numbers of items": use_items,
    "buckets": use_buckets,
    "tar shards": use_shards,
}


def use_part(name, folder):
    """Return what a part does that is taken out, and what it does in the file."""
    module = take_out(parts()[name])
    return USES[name](module, folder), USES[name](ddp, folder)


class TheReadme(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        blocks = re.findall(r"(?s)```(?:diff|python)\n(.*?)```", README)
        cls.diff, cls.diff_of_the_step, cls.my_job, cls.regression, cls.exercises = blocks

    def test_the_two_sides_of_its_diffs_train_the_same(self):
        plain = re.sub(r"(?m)^( |-|\+.*\n)", "", self.diff)  # without the lines with a +
        data_parallel = re.sub(r"(?m)^( |\+|-.*\n)", "", self.diff)  # without those with a -
        with_train_step = data_parallel
        for hunk in re.findall(r"(?:[-+ ].*\n)+", self.diff_of_the_step):
            before = re.sub(r"(?m)^( |-|\+.*\n)", "", hunk)
            self.assertIn(before, data_parallel)
            after = re.sub(r"(?m)^( |\+|-.*\n)", "", hunk)
            with_train_step = with_train_step.replace(before, after)
        results, programs = [], []
        for name, side in enumerate((plain, data_parallel, with_train_step)):
            results.append(self.folder / f"{name}.pt")
            program = self.write(side.replace("model.pt", str(results[-1])), f"side_{name}")
            launcher = [*ONE_MACHINE, "--nproc-per-node=2"] if name else []
            programs.append(start(*launcher, program, GLOO_SOCKET_IFNAME=LOOPBACK))
        for program in programs:
            finish(program)

        expected, *trained = map(torch.load, results)
        for parameters in trained:
            assert_close(parameters, expected)

    def test_its_script_stopped_on_3_ranks_and_resumed_on_2_ends_as_the_uninterrupted_job(self):
        script = self.write(self.my_job)
        task = functools.partial(task_of_script, script)
        options = "--global-batch-size 300 --epochs 1 --clip-grad-norm 1"
        expected = on_ranks(1, job, options, task)[0]
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/mine.pt"
        on_ranks(3, job, options, task, stop_at=3)[0]

        out, _ = run(script, *options.split(), "--channels", 4, "--nproc-per-node", 2)

        self.assertIn("epoch 0, 600 samples read", out)
        self.assertEqual(epochs_of(out), epochs_of(expected.out))

    def test_its_regression_trains_the_same_on_1_and_3_ranks(self):
        task = functools.partial(task_of_script, self.write(self.regression))

        one, three = (on_ranks(ranks, job, "--epochs 2", task)[0] for ranks in (1, 3))

        self.assertRegex(one.out, r"absolute_error [0-9.]+ \| val_loss \S+ val_absolute_error")
        self.assertEqual(epochs_of(three.out), epochs_of(one.out))

    def test_its_command_makes_a_shard_that_can_be_trained_on(self):
        for i, sample in enumerate(ddp.SyntheticDataset(4, 8)):
            for name, tensor in zip("xy", sample, strict=True):
                np.save(self.folder / f"{i:06d}.{name}.npy", tensor.numpy())
        command = re.search(r"tar -cf [^`]*", README)[0]

        subprocess.run(command, shell=True, cwd=self.folder, check=True)

        shards = f"--shards {self.folder}/train-*.tar --val-shards {self.folder}/train-*.tar"
        out = on_ranks(2, job, f"--epochs 1 {shards} --samples-per-epoch 100")[0].out
        self.assertIn("epoch 0 | loss", out)

    def test_each_part_that_its_table_lists_works_without_the_rest_of_the_file(self):
        for number in range(2):
            (self.folder / f"{number}.tar").write_bytes(tar(*sample_of(number)))

        self.assertEqual(parts().keys(), USES.keys())
        for name in USES:
            with self.subTest(name):
                for part, file in on_ranks(2, use_part, name, self.folder):
                    torch.testing.assert_close(part, file, rtol=0, atol=0)

    def test_each_hunk_of_its_exercises_is_of_the_file(self):
        lines = SCRIPT.read_text().splitlines()
        hunks = re.findall(r"(?m)^@@ -(\d+).*\n((?:[-+ ].*\n)+)", self.exercises)

        self.assertEqual(len(hunks), 7)
        for number, hunk in hunks:
            before = [line[1:] for line in hunk.splitlines() if line[0] != "+"]
            first = int(number) - 1
            self.assertEqual(lines[first : first + len(before)], before)

    def test_the_tests_that_its_tables_name_exist(self):
        names = re.findall(r"(?m)^\|[^|]*\|[^|]*\| `(\w+)` \|", README)  # the third column
        tests = pathlib.Path(__file__).read_text()

        self.assertGreater(len(names), 15)
        for name in names:
            self.assertTrue(re.search(rf"def test_\w*{name}", tests), name)


# ---- The command line
class TheCommandLine(Test):
    TORCHRUN = {
        "TORCHELASTIC_RUN_ID": "1",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "3",
    }

    def refusal(self, options):
        """Return the one line with which a command line is refused."""
        with (
            contextlib.redirect_stderr(io.StringIO()) as err,
            self.assertRaisesRegex(SystemExit, "2"),
        ):
            ddp.main(options.split())
        self.assertEqual(err.getvalue().count("\n"), 1)
        return err.getvalue()

    def test_a_number_out_of_range_is_refused_with_the_range(self):
        options = (
            "--epochs=0 --epochs=1.5 --global-batch-size=-4 --micro-batch-size=0 --num-samples=0 "
            "--length=0 --lr=-1 --lr=nan --lr=inf --nproc-per-node=0 --clip-grad-norm=-1 "
            "--num-workers=-1 --seed=-1 --checkpoint-every=0 --samples-per-epoch=0 --timeout=0"
        )
        for option in options.split():
            with self.subTest(option):
                name, value = option.split("=")
                self.assertRegex(self.refusal(option), f"argument {name}: .*{value}")

    def test_the_defaults_are_those_that_the_help_says(self):
        parser = ddp.make_parser()
        said = re.findall(
            r"--([a-z-]+) [A-Z_]+\s(?:(?!--)[^\[])*\[([\d.]+)\]", parser.format_help()
        )

        self.assertGreater(len(said), 6)
        for name, value in said:
            default = vars(parser.parse_args([]))[name.replace("-", "_")]
            self.assertEqual(str(default), value, name)

    def test_options_that_cannot_work_are_refused(self):
        for options, message in {
            "--wat": "unrecognized arguments: --wat",
            "--global-batch-size 4 --nproc-per-node 5": "5 processes are more than the 4",
            "--checkpoint-every 1": "needs --checkpoint",
            "--shards x": "go together",
            "--val-shards x": "go together",
            "--samples-per-epoch 4": "go together",
            "--parallel dp --amp": "one process",
            "--parallel dp --nproc-per-node 2": "one process",
            "--backend nccl": "--backend gloo",
        }.items():
            with self.subTest(options):
                self.assertIn(message, self.refusal(options))

    def test_under_torchrun_the_number_of_processes_is_torchruns(self):
        with mock.patch.dict(os.environ, self.TORCHRUN):
            self.assertIn("torchrun's own", self.refusal("--nproc-per-node 2"))
            self.assertIn("3 processes are more", self.refusal("--global-batch-size 2"))
            self.assertIn("dp is one process", self.refusal("--parallel dp"))
            self.assertIn("NCCL needs a GPU a process", self.refusal("--backend nccl"))

    def test_data_parallel_is_one_process_by_default(self):
        args = task_args("--parallel dp")

        ddp.decide_processes(args, self.fail)

        self.assertEqual(args.world_size, 1)
        self.assertIs(type(ddp.wrap(plain_net(), None, None, {}, args)), nn.DataParallel)

    def test_as_many_processes_as_samples_in_a_step_are_allowed(self):
        args = task_args("--nproc-per-node 4 --global-batch-size 4")

        ddp.decide_processes(args, self.fail)
        ddp.decide_batches(args, self.fail)

        self.assertEqual(args.micro_batch_size, 1)

    def test_restarts_that_would_hang_are_refused_with_the_remedy(self):
        restarting = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with mock.patch.dict(os.environ, self.TORCHRUN | restarting):
            self.assertIn("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", self.refusal(""))

    def test_processes_of_another_launcher_are_refused(self):
        with mock.patch.dict(os.environ, WORLD_SIZE="2", RANK="0"):
            self.assertIn("start the processes with torchrun", self.refusal(""))

    def test_gpus_that_do_not_start_are_refused_with_the_way_out(self):
        found_but_not_started = {"device_count": lambda: 2, "is_available": lambda: False}
        with mock.patch.multiple(torch.cuda, **found_but_not_started):
            self.assertIn("CUDA_VISIBLE_DEVICES= trains without", self.refusal(""))

    def test_a_pytorch_that_is_too_old_is_refused(self):
        with mock.patch.object(torch, "__version__", type(torch.__version__)("2.8.1")):
            self.assertIn("PyTorch 2.8.1 is too old: 2.9 or newer", self.refusal(""))


# ---- On GPUs, if there are any
TRAIN_WITH_ADAGRAD = """
def my_task(args, device):
    task = ddp.make_task(args, device)
    task.optimizer = torch.optim.Adagrad(task.module.parameters())
    return task
"""


@unittest.skipUnless(GPUS, "needs a GPU")
class OnGPUs(Test):
    VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))

    def run_job(self, options, script=SCRIPT):
        return run(script, *options.split(), CUDA_VISIBLE_DEVICES=self.VISIBLE)[0]

    def test_the_main_job_learns_with_one_process_per_gpu(self):
        for options in ("", "--amp", "--num-workers 2", "--micro-batch-size 2"):
            out = self.run_job(f"--epochs 20 --length 1000 {options}")

            self.assertIn(f"ddp on nccl, world size {GPUS}, cuda, ", out)
            self.assert_learned(out)

    def test_data_parallel_learns_in_one_process(self):
        out = self.run_job("--epochs 20 --length 1000 --parallel dp")

        self.assertIn("dp on nccl, world size 1, cuda, ", out)
        self.assert_learned(out)

    def test_the_training_is_the_same_on_1_2_and_3_processes(self):
        losses = []
        for nproc_per_node in (1, 2, 3):
            out = self.run_job(f"{SMALL} --backend gloo --nproc-per-node {nproc_per_node}")
            losses.append(float(re.search(r"\| loss (\S+)", out)[1]))

        self.assertLess(max(losses) - min(losses), 0.001)

    def test_gloo_processes_share_a_gpu(self):
        out = self.run_job(f"{SMALL} --nproc-per-node {GPUS + 1}")

        self.assertIn(f"ddp on gloo, world size {GPUS + 1}, cuda, ", out)

    def test_an_optimizer_that_makes_its_state_at_once_trains(self):
        out = self.run_job(SMALL, self.script(TRAIN_WITH_ADAGRAD))

        self.assertIn("epoch 1 | loss", out)

    def test_a_resumed_job_goes_on(self):
        options = f"{SMALL} --checkpoint {self.folder}/ck"
        self.run_job(f"{options} --epochs 1")

        self.assertIn("epoch 1, 0 samples read", self.run_job(options))

    def test_a_launcher_that_shows_each_process_a_gpu_of_its_own_may_ask_for_nccl(self):
        script = self.script(
            "ddp.run_rank = lambda rank, local_rank, args, task: print(args.backend)"
        )
        environ = {
            "TORCHELASTIC_RUN_ID": "1",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "RANK": "0",
            "LOCAL_RANK": "3",
            "WORLD_SIZE": "16",
            "LOCAL_WORLD_SIZE": "8",
            "CUDA_VISIBLE_DEVICES": self.VISIBLE.split(",")[0],
        }

        asked, _ = run(script, "--backend", "nccl", **environ)
        unasked, _ = run(script, **environ)

        self.assertEqual((asked, unasked), ("nccl\n", "gloo\n"))


# ---- Your own job under the guarantees: bash run.sh test my_job.py [its options]
def program_of(path):
    """Return (make_task, parser) that a program gives to ddp.main."""
    path, given = pathlib.Path(path).resolve(), []

    def main(argv, make_task=ddp.make_task, parser=None):
        given.extend([make_task, parser or ddp.make_parser()])

    sys.path.insert(0, str(path.parent))
    sys.modules.pop(path.stem, None)  # and with it what a former job has left there
    with mock.patch.object(ddp, "main", main):
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
        if not given:
            ddp.make_parser().error(f"{path} does not call ddp_reference.main")
        make_task, parser = given
        try:
            module = importlib.import_module(path.stem)  # as loader workers do
        except SystemExit:
            parser.error(f"{path} needs `if __name__ == '__main__':` before it calls main")
    return getattr(module, make_task.__name__, make_task), parser


def equal(tensor, other):
    """Return whether tensors are equal, also where they are not numbers."""
    return torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


def cause_in_the_data(task, args):
    """Return in a sentence why the samples may depend on the number of processes, or None."""
    for name in "train_set", "val_set":
        if isinstance(getattr(task, name), IterableDataset):
            return f"{name} is a stream, whose samples are drawn by rank and loader worker"
        items = ddp.SeededItems(getattr(task, name), args.seed)
        for i in range(min(len(items), 20)):
            once, again = (task.collate_fn([items[i]]) for _ in range(2))
            if not all(map(equal, once, again)):
                return f"{name}[{i}] is another each time, as it draws from a generator of its own"


def cause_in_the_net(task, args, device):
    """Return in a sentence why the rest of a job may depend on the number of processes.

    It runs the net, which may change its buffers.
    """
    x, y = (tensor.to(device) for tensor in task.collate_fn([task.val_set[0]] * 2))
    output = task.module.eval()(x)
    once, twice = (task.batch_sums(output[:n], y[:n])[0].item() for n in (1, 2))
    if not math.isclose(2 * once, twice, rel_tol=1e-3):
        return f"batch_sums returns a mean: {once:.4g} for a sample, {twice:.4g} for it twice"
    outputs = []
    for seed in (0, 1):
        ddp.seed_generators(seed)
        outputs.append(task.module.train()(x))
    if not torch.allclose(*outputs, equal_nan=True):
        return "the net draws random numbers (a Dropout layer?), others on each rank"
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in task.module.modules()):
        if args.local_bn:
            return "--local-bn gives each rank's BatchNorm its own statistics"
        if args.micro_batch_size < args.global_batch_size:
            return "BatchNorm's statistics are of a micro-batch of each rank: --micro-batch-size"
    if args.amp or any(parameter.itemsize < 4 for parameter in task.module.parameters()):
        return "bfloat16 or float16, whose rounding is coarse"
    return "a gradient of rounding errors, as of a bias before BatchNorm; or a layer with a state"


def run_of_program(path, options, stop_at=None):
    """Run one rank of a program's job on its first samples.

    Returns what it prints (out), the net before the first step and after each, of each tensor at
    most 1000 numbers (nets), the evaluation of the first of them, and why these may depend on the
    number of processes (cause).
    """
    make_task, parser = program_of(path)
    result = types.SimpleNamespace(nets=[])

    def note_net(module):
        numbers = {}
        for name, tensor in module.state_dict().items():
            part = tensor.flatten()[:: tensor.numel() // 1000 + 1]
            numbers[name] = part.to(CPU, torch.float64, copy=True)
        result.nets.append(numbers)

    def noted_task(args, device):
        task = make_task(args, device)
        most = 9 * args.global_batch_size // 2 + 1  # Four steps and a half.
        for name in "train_set", "val_set":
            dataset = getattr(task, name)
            if not isinstance(dataset, IterableDataset):
                setattr(task, name, Subset(dataset, range(min(len(dataset), most))))
        state = {name: tensor.clone() for name, tensor in task.module.state_dict().items()}
        result.cause = cause_in_the_data(task, args) or cause_in_the_net(task, args, device)
        task.module.load_state_dict(state)
        loader = ddp.make_loader(task, device, args, training=False)
        options = task.batch_sums, task.count_labels, args.amp
        result.evaluation = ddp.evaluate(task.module, loader, device, *options)
        note_net(task.module)
        task.optimizer.register_step_post_hook(lambda *args: note_net(task.module))
        return task

    result.out = job(options, noted_task, stop_at, parser=parser).out
    return result


def numbers_of(line):
    """Return the numbers in a line that a job has printed, and none that is part of a name."""
    return [float(number) for number in re.findall(r"(?<= )(?:-?\d\S*|nan)(?= |$)", line)]


def first_difference(ran, expected, exact=False):
    """Return in a sentence what differs first between two jobs, or None.

    Unless exact, a tensor may differ by a hundredth of the way that it has gone.
    """
    before = expected.nets[0]
    for step, (net, expected_net) in enumerate(zip(ran.nets, expected.nets, strict=True)):
        for name, tensor in expected_net.items():
            differs = (net[name] - tensor).norm().item()
            moved = (tensor - before[name]).norm().item()
            rounding = 0 if exact else moved / 100 + tensor.norm().item() / 1e6
            if not (equal(net[name], tensor) or differs <= rounding):
                difference = f"{name} differs by {differs:.1e}, having moved {moved:.1e}"
                return f"after step {step} {difference}"
    rel_tol, abs_tol = (0, 0) if exact else (1e-3, 0.002)
    for line, expected_line in zip(epochs_of(ran.out), epochs_of(expected.out), strict=True):
        numbers, expected_numbers = numbers_of(line), numbers_of(expected_line)
        if not np.allclose(numbers, expected_numbers, rel_tol, abs_tol, equal_nan=True):
            return f"{line}, not {expected_line}"
    if exact and digest_of(ran.out)[-1:] != digest_of(expected.out)[-1:]:
        return "the digest differs"


def evaluation_differs(expected, *others):
    """Return in a sentence how evaluation differs on other numbers of processes, or None."""
    for ran in others:
        if not np.allclose(ran.evaluation, expected.evaluation, rtol=1e-4, equal_nan=True):
            return f"loss and metric are {ran.evaluation}, not {expected.evaluation}"


def check_program(path, *options):
    """Print whether a program's job keeps four guarantees; return the exit status, 0 or 1."""
    if not os.path.exists(path):
        ddp.make_parser().error(f"there is no {path}")
    _, parser = program_of(path)
    args = parser.parse_args(["--epochs=2", *options])
    if args.checkpoint or args.parallel == "dp":
        parser.error("a test has no --checkpoint and no --parallel dp")
    options = shlex.join(["--epochs=2", *options])
    one, two, three = (on_ranks(n, run_of_program, path, options)[0] for n in (1, 2, 3))
    steps = len(one.nets) - 1
    if steps < 2:
        parser.error("a test needs two steps: --epochs, --global-batch-size")
    with tempfile.TemporaryDirectory() as folder:
        options += f" --checkpoint-every 1 --checkpoint {shlex.quote(folder)}/"
        stop_at = max(2, steps // args.epochs // 2 + 1)
        stopped = on_ranks(3, run_of_program, path, f"{options}2", stop_at)[0]
        shutil.copy(f"{folder}/2", f"{folder}/3")
        on_2, on_3 = (on_ranks(n, run_of_program, path, f"{options}{n}")[0] for n in (2, 3))
    for resumed in (on_2, on_3):
        resumed.nets = stopped.nets + resumed.nets[1:]
        resumed.out = stopped.out + resumed.out

    training = first_difference(two, one) or first_difference(three, one)
    differences = {
        "evaluation is the same on 1, 2 and 3 processes": evaluation_differs(one, two, three),
        "training is the same on 1, 2 and 3 processes": training,
        "stopped on 3 in mid-epoch, resumed on 2: the same": first_difference(on_2, one),
        "stopped and resumed on 3: the same bits": first_difference(on_3, three, exact=True),
    }
    for guarantee, difference in differences.items():
        print("FAIL" if difference else "pass", guarantee)
        if difference:
            print(f"     {difference}")
    failed = any(differences.values())
    if failed:
        print(f"likely cause: {one.cause}")
    return int(failed)


class YourJob(Test):
    """What is said of the README's script, and of copies of it that have a fault each."""

    def check(self, line="", replacement="", options=()):
        """Return the status and what is printed for the script with a line replaced."""
        program = re.search(r"(?s)This is `my_job.py`.*?```python\n(.*?)```", README)[1]
        self.assertIn(line, program)
        name = self.id().rpartition(".")[2]
        path = self.write(program.replace(line, replacement), name)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = check_program(path, *options)
        return status, out.getvalue()

    def assert_found(self, cause, *change):
        """Assert that a change to the script makes training differ; return what is printed."""
        status, out = self.check(*change)

        self.assertEqual(status, 1)
        self.assertRegex(out, r"FAIL training is the same .*\n.* step \d \S+ differs by")
        self.assertRegex(out, f"\nlikely cause: .*{cause}")
        self.assertNotIn("nan", out)
        return out

    def test_the_readmes_script_keeps_all_guarantees(self):
        status, out = self.check(options=["--channels=4"])

        self.assertEqual((status, re.findall("(?m)^pass|^FAIL", out)), (0, ["pass"] * 4))

    def test_what_cannot_be_tested_is_refused(self):
        program = self.script("", "refused")
        for arguments, message in (
            (["none.py"], "there is no none.py"),
            ([self.write("", "empty")], "does not call ddp_reference.main"),
            ([program, "--checkpoint", "ck"], "no --checkpoint"),
            ([program, "--epochs", "1", "--global-batch-size", "100"], "needs two steps"),
        ):
            with (
                contextlib.redirect_stderr(io.StringIO()) as err,
                self.assertRaisesRegex(SystemExit, "2"),
            ):
                check_program(*arguments)
            self.assertIn(message, err.getvalue())

    def test_dropout_is_found_and_stops_without_harm(self):
        change = "nn.Flatten()", "nn.Flatten(), nn.Dropout()"
        out = self.assert_found("the net draws random numbers", *change)

        self.assertIn("pass stopped and resumed on 3: the same bits", out)

    def test_items_with_unseeded_random_numbers_are_found(self):
        unseeded = "__import__('numpy').random.default_rng().random()"
        out = self.assert_found("is another each time, as it draws", "torch.rand(())", unseeded)

        self.assertIn("FAIL stopped and resumed on 3: the same bits", out)

    def test_a_loss_that_is_a_mean_is_found(self):
        mean = "batch_sums=lambda output, y: (nn.functional.cross_entropy(output, y), y.sum()))"
        out = self.assert_found("batch_sums returns a mean", "lr_factor=lr_factor)", mean)

        self.assertIn("FAIL evaluation is the same", out)

    def test_micro_batches_under_batch_norm_are_found_and_an_infinite_buffer_does_no_harm(self):
        buffer = '    net.register_buffer("mask", torch.full((2, 2), -math.inf))\n'
        change = "    optimizer = ", f"{buffer}    optimizer = ", ["--micro-batch-size=4"]
        self.assert_found("BatchNorm's statistics are of a micro-batch", *change)


class Result(unittest.TextTestResult):
    """Counts the tests that passed: whether testsRun counts skipped ones depends on the Python."""

    passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`, or check a program."""
    if sys.argv[1:] and sys.argv[1].endswith(".py"):
        try:
            sys.exit(check_program(*sys.argv[1:]))
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # Other ranks may wait for the one that has failed.
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result)
    result = unittest.main(exit=False, testRunner=runner).result
    bad = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    failed, skipped = len(bad), len(result.skipped)
    print(f"{result.passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0 or not result.passed + skipped)  # -k NAME may be mistyped


if __name__ == "__main__":
    main()
