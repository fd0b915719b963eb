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
import faulthandler
import functools
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data import DistributedSampler as TorchSampler

import ddp_reference as ddp

CPU = torch.device("cpu")
GPUS = torch.cuda.device_count()
HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE / "ddp_reference.py"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
TORCHRUN = ["-m", "torch.distributed.run", "--local-addr=127.0.0.1"]  # whatever the host's name is
SMALL = "--num-samples 44 --length 64 --epochs 2"  # steps of 22 and 22 samples


# ---- Lesson 1: which samples a rank reads
# DistributedSampler has the indices of PyTorch's own. DistributedBatchSampler deals out steps that
# are the same on any number of ranks. To break it, leave out `+ self.epoch` in order():
# test_the_indices_are_those_of_pytorchs_sampler turns red.
def steps_of_ranks(world_size, num_samples, batch, samples_read=0, drop_last=False):
    """Return for each step of an epoch the samples that all ranks read, each rank in its turn."""
    ranks = []
    for rank in range(world_size):
        sampler = ddp.DistributedSampler(range(num_samples), world_size, rank)
        batch_sampler = ddp.DistributedBatchSampler(sampler, batch, drop_last)
        batch_sampler.set_epoch(3, samples_read)
        ranks.append(list(batch_sampler))
        assert len(batch_sampler) == len(ranks[-1])
    steps = []
    for shares in zip(*ranks, strict=True):
        turns = itertools.zip_longest(*shares)
        steps.append([index for turn in turns for index in turn if index is not None])
    return steps


class Lesson1Sampler(unittest.TestCase):
    def test_the_indices_are_those_of_pytorchs_sampler(self):
        booleans = True, False
        cases = itertools.product(range(20), range(1, 8), booleans, booleans)
        for n, num_replicas, shuffle, drop_last in [*cases, (16385, 2, True, False)]:
            for rank in range(num_replicas):
                arguments = range(n), num_replicas, rank, shuffle, 7, drop_last
                ours, torchs = ddp.DistributedSampler(*arguments), TorchSampler(*arguments)
                for epoch in (0, 5):
                    ours.set_epoch(epoch)
                    torchs.set_epoch(epoch)

                    self.assertEqual(list(ours), list(torchs))
                    self.assertEqual(vars(ours) | vars(torchs), vars(ours))  # the attributes, too

    def test_a_step_has_the_same_samples_on_any_number_of_ranks(self):
        expected = steps_of_ranks(1, num_samples=100, batch=24)

        for world_size in (2, 3, 5, 14):
            self.assertEqual(steps_of_ranks(world_size, num_samples=100, batch=24), expected)
        self.assertEqual([len(step) for step in expected], [24, 24, 24, 14, 14])
        self.assertEqual(sorted(sum(expected, [])), list(range(100)))  # each sample once


# ---- Lesson 2: nine cases of two ranks
# What goes wrong without a sampler and without set_epoch, and what becomes of samples that do not
# fill a batch: `bash run.sh cases`. To break it, leave out sampler.set_epoch(epoch) in show_case:
# test_the_cases_show_the_batches_of_pytorchs_sampler turns red.
class Lesson2Cases(unittest.TestCase):
    CASE_3 = """
case 3: set_epoch: a new split each epoch
8 samples, 2 ranks, batches of 4
  epoch 0  rank 0  [4, 7, 2, 1]
  epoch 0  rank 1  [0, 3, 5, 6]
  epoch 1  rank 0  [5, 2, 7, 1]
  epoch 1  rank 1  [4, 6, 3, 0]
"""

    def shown(self):
        """Return what `bash run.sh cases` prints."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ddp.main(["cases"], ddp.make_task)
        return out.getvalue()

    def test_the_cases_show_the_batches_of_pytorchs_sampler(self):
        ours = self.shown()

        with mock.patch.object(ddp, "DistributedSampler", TorchSampler):
            torchs = self.shown()

        self.assertEqual(ours, torchs)
        self.assertIn(self.CASE_3, ours)
        self.assertEqual(ours.count("case"), 9)


# ---- Lesson 3: a step
# Every rank ends a step with the parameters of one process that had the whole batch, however
# unequally many labels the ranks have. To break it, leave out `dist.get_world_size() /` in
# train_step: test_on_any_number_of_ranks_a_step_is_that_of_one_process_on_the_whole_batch turns
# red. With two ranks a step goes like this; the last line is the same on both:
#
#     rank 0   samples 0 2 4 ... of the step   forward   backward ┐
#                                                                 ├ all-reduce   optimizer.step()
#     rank 1   samples 1 3 5 ... of the step   forward   backward ┘
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


def step_on_a_share(x, y, micro_batch_size, **options):
    """Make a step with SGD on this rank's share of a batch: return (parameters, the job's sums)."""
    model = DistributedDataParallel(plain_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1)  # Adam would hide a wrong factor.
    share = x[dist.get_rank() :: dist.get_world_size()], y[dist.get_rank() :: dist.get_world_size()]
    micro_batches = ddp.split_share(share, len(x), micro_batch_size)
    sums = ddp.train_step(model, optimizer, micro_batches, seed=(0,), **options)
    return list(model.module.parameters()), sums


def step_of_one_process(x, y):
    """The same in plain PyTorch, on the whole batch."""
    net = plain_net()
    logits = net(x)
    loss, labels = F.cross_entropy(logits, y), (y >= 0).sum()
    loss.backward()
    torch.optim.SGD(net.parameters(), lr=1).step()
    sums = torch.stack([loss * labels, (logits.argmax(1) == y).sum(), labels])
    return list(net.parameters()), sums.double().detach()


class Lesson3Step(unittest.TestCase):
    def test_on_any_number_of_ranks_a_step_is_that_of_one_process_on_the_whole_batch(self):
        x, y = default_collate(uneven_data(12))
        expected = step_of_one_process(x, y)

        for world_size, micro_batch_size in ((1, 5), (2, 4), (3, 4), (3, 1), (5, 2), (5, 1)):
            with self.subTest(world_size=world_size, micro_batch_size=micro_batch_size):
                for step in on_ranks(world_size, step_on_a_share, x, y, micro_batch_size):
                    assert_close(step, expected)


# ---- Lesson 4: evaluation
# Loss and accuracy are those of one batch in one process, whatever the ranks' shares are. To break
# it, leave out `dist.all_reduce(sums)` in evaluate:
# test_on_1_to_4_ranks_it_gives_the_numbers_of_one_batch_in_one_process turns red.
def evaluation(num_samples):
    """Return the loss and the accuracy that evaluate() gives on this rank."""
    data = ddp.SyntheticDataset(num_samples, 40)
    share = [data[i] for i in range(dist.get_rank(), num_samples, dist.get_world_size())]
    return ddp.evaluate(plain_net(), DataLoader(share, 4), CPU)


def loss_and_accuracy(net, data):
    """Return what evaluation must give, from one batch in one process."""
    x, y = default_collate(list(data))
    logits = net(x)
    accuracy = (logits.argmax(1) == y).double().mean()
    return [F.cross_entropy(logits, y).item(), accuracy.item()]


class Lesson4Evaluation(unittest.TestCase):
    def test_on_1_to_4_ranks_it_gives_the_numbers_of_one_batch_in_one_process(self):
        expected = loss_and_accuracy(plain_net(), ddp.SyntheticDataset(25, 40))

        for world_size in (1, 2, 3, 4):
            for numbers in on_ranks(world_size, evaluation, 25):
                assert_close(numbers, expected)

    def test_a_rank_without_a_sample_takes_part(self):
        expected = loss_and_accuracy(plain_net(), ddp.SyntheticDataset(2, 40))

        assert_close(on_ranks(3, evaluation, 2), [expected] * 3)


# ---- Lesson 5: BatchNorm over the job
# It is one nn.BatchNorm over what all ranks compute at once: the whole global batch, if a share is
# one micro-batch. To break it, leave out `(means - mean).square()` in job_statistics:
# test_outputs_gradients_and_statistics_are_those_of_one_process turns red.
def net_with_batch_norm(affine=True, momentum=0.1):
    """Return a net with BatchNorm in two dimensions, and on features."""
    options = {"affine": affine, "momentum": momentum}
    layers = nn.BatchNorm2d(3, **options), nn.Tanh(), nn.Flatten(), nn.BatchNorm1d(12, **options)
    return nn.Sequential(*layers)


def run_net(net, x, gradient):
    """Run a net forward and backward: return outputs, the gradient of x, others, and buffers."""
    x = x.clone().requires_grad_()
    output = net(x)
    (output * gradient).sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    return output.detach(), x.grad, gradients, dict(net.named_buffers())


def share_through_net(x, gradient, options):
    """Return what run_net() does for one of three unequal parts of x, with BatchNorm over the job.

    The gradients of the parameters are added up over the ranks, as DDP does.
    """
    part = (slice(0, 4), slice(4, 7), slice(7, 9))[dist.get_rank()]
    net = net_with_batch_norm(**options)
    ddp.convert_batch_norm(net)
    results = run_net(net, x[part], gradient[part])
    for parameter_gradient in results[2]:
        dist.all_reduce(parameter_gradient)
    return results


class Lesson5BatchNorm(unittest.TestCase):
    def assert_same_as_one_process(self, x, tolerance=1e-6, **options):
        gradient = torch.randn(9, 12, generator=torch.Generator().manual_seed(1)) / 10
        expected = run_net(net_with_batch_norm(**options), x, gradient)
        close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)

        ranks = on_ranks(3, share_through_net, x, gradient, options)

        close(torch.cat([rank[0] for rank in ranks]), expected[0])
        close(torch.cat([rank[1] for rank in ranks]), expected[1])
        for rank in ranks:
            close(rank[2:], expected[2:])

    def test_outputs_gradients_and_statistics_are_those_of_one_process(self):
        self.assert_same_as_one_process(nine_samples())

    def test_so_they_are_without_parameters_and_with_a_cumulative_average(self):
        self.assert_same_as_one_process(nine_samples(), affine=False, momentum=None)

    def test_so_they_are_far_from_zero_where_sums_of_squares_would_cancel(self):
        self.assert_same_as_one_process(1000 + nine_samples(), tolerance=1e-3)


def nine_samples():
    """Return random x."""
    return torch.randn(9, 3, 2, 2, generator=torch.Generator().manual_seed(0))


# ---- Lesson 6: the number of processes changes nothing, and a stopped job goes on
# On other numbers of ranks the epochs print the same, also after stops; on the same number each bit
# is the same. To break it, save `"optimizer": {}` in save_job:
# test_so_it_does_stopped_on_4_ranks_and_resumed_on_3_then_5_then_2 turns red. To see what the first
# backward in data_parallel is there for, leave out its four lines.
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


def job(options, make_task=ddp.make_task, stop_at=None, terminal=False):
    """Run one rank of a job with these options, as job_of() does.

    job("--epochs 2 --length 64") is one of the shipped net.
    """
    parser = ddp.make_parser()
    ddp.add_task_options(parser)
    args = parser.parse_args([*shlex.split(options), f"--nproc-per-node={dist.get_world_size()}"])
    ddp.decide_processes(args, parser.error)
    return job_of(args, make_task, stop_at, terminal)


def job_of(args, make_task, stop_at=None, terminal=False):
    """Run one rank of a job, to its end or until it would make its step number `stop_at`.

    What stops it is lr_factor, which is called before each step. Returns what it printed (out), the
    tensors of its net (state_dict) and for each step the epochs that were done before (epochs).
    """
    result = types.SimpleNamespace(epochs=[])

    def make_stopping_task(args, device):
        task = make_task(args, device)
        result.state_dict = task.module.state_dict()  # the net's own tensors, no copies

        def lr_factor(epochs):
            if len(result.epochs) + 1 == stop_at:
                raise InterruptedError
            result.epochs.append(epochs)
            return task.lr_factor(epochs)

        return dataclasses.replace(task, lr_factor=lr_factor)

    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.suppress(InterruptedError),
    ):
        out.isatty = lambda: terminal
        ddp.train(args, CPU, make_stopping_task, timeout=300)
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    result.out = out.getvalue()
    return result


def error_of_job(options, make_task=ddp.make_task):
    """Return the error with which one rank of a job ends, as "ValueError: no sample"."""
    try:
        job(options, make_task)
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


def run(*command, status=0, **environ):
    """Run a Python program to its end, as in out, err = run(SCRIPT, "--epochs", 1)."""
    return finish(start(*command, **environ), status)


def sgd_task(args, train_set, val_set, net, **options):
    """Return a task that is trained with SGD."""
    optimizer = torch.optim.SGD(net.parameters(), args.lr)
    return ddp.Task(train_set, val_set, net, optimizer, **options)


def assert_close(actual, expected):
    """Assert that numbers or tensors are equal but for the rounding of float32."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


class Test(unittest.TestCase):
    """A test case with a folder of its own."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)

    @classmethod
    def script(cls, change, name="my_job"):
        """Write a program that changes ddp_reference, or has a make_task, and calls its main.

        run(self.script("ddp.train = print")) runs a job whose ranks only print.
        """
        path = cls.folder / f"{name}.py"
        path.write_text(f"""
import os, signal, sys
import torch
import torch.distributed as dist
import ddp_reference as ddp
make_task = ddp.make_task
{change}
if __name__ == "__main__":
    parser = ddp.make_parser()
    ddp.add_task_options(parser)
    sys.exit(ddp.main(sys.argv[1:], make_task, parser))
""")
        return str(path)


# ---- The sampler and the steps
def expected_steps(order, batch, drop_last):
    """Return the samples of an epoch's steps, the last two of which share what is left."""
    steps = []
    while len(order) >= (batch if drop_last else 1):
        shared = not drop_last and batch < len(order) < 2 * batch
        size = (len(order) + 1) // 2 if shared else batch
        steps.append(order[:size])
        order = order[size:]
    return steps


class TheSampler(unittest.TestCase):
    def test_pytorchs_int32_and_int64_permutations_are_the_same(self):
        for n in (10, 100_003, 3_000_000):
            torch.manual_seed(n)
            int32 = torch.randperm(n, dtype=torch.int32)
            torch.manual_seed(n)
            int64 = torch.randperm(n)

            self.assertTrue(torch.equal(int32, int64))

    def test_it_takes_four_bytes_a_sample_and_makes_no_list_of_all_indices(self):
        for shuffle in (True, False):
            sampler = ddp.DistributedSampler(range(1_000_000), 1, 0, shuffle)
            tracemalloc.start()

            next(iter(sampler))

            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            self.assertLess(most, 1_000_000)  # the list: 36 million bytes
            sampler.set_epoch(1)
            self.assertEqual(sampler.order().nbytes, 4_000_000)

    def test_a_second_pass_without_set_epoch_warns_with_the_remedy(self):
        sampler = ddp.DistributedSampler(range(5), 2, 0)
        batch_sampler = ddp.DistributedBatchSampler(sampler, 5)
        for reads in (sampler, batch_sampler):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for epoch in range(3):
                    reads.set_epoch(epoch)
                    list(reads)

            with self.assertWarnsRegex(UserWarning, r"call set_epoch\(epoch\)") as warning:
                list(reads)
            self.assertEqual(warning.filename, __file__)

    def test_a_rank_out_of_range_is_an_error_that_says_so(self):
        for rank in (-1, 2):
            with self.assertRaisesRegex(ValueError, f"rank {rank} is not one of 2"):
                ddp.DistributedSampler(range(5), 2, rank)

    def test_from_any_start_any_number_of_ranks_makes_the_steps_that_are_left(self):
        cases = itertools.product((23, 24, 36), (5, 8, 12), (0, 1, 7, 16), (True, False))
        for n, batch, start, drop_last in cases:
            [order] = steps_of_ranks(1, n, n)
            whole = expected_steps(order, batch, drop_last)
            expected = expected_steps(order[start:], batch, drop_last)

            for world_size in (1, 2, 3, 5):
                if all(len(step) >= world_size for step in whole + expected):
                    steps = steps_of_ranks(world_size, n, batch, start, drop_last)
                    self.assertEqual(steps, expected)
                else:
                    with self.assertRaisesRegex(ddp.InputError, "is too small for"):
                        steps_of_ranks(world_size, n, batch, start, drop_last)

    def test_what_is_left_of_an_epoch_may_be_nothing_but_an_epoch_may_not(self):
        self.assertEqual(steps_of_ranks(2, 24, 8, samples_read=24), [])
        self.assertEqual(steps_of_ranks(2, 20, 8, samples_read=16, drop_last=True), [])
        for num_samples, drop_last in ((0, False), (7, True)):
            with self.assertRaisesRegex(ddp.InputError, "nothing to train on: no step of 8"):
                steps_of_ranks(2, num_samples, 8, drop_last=drop_last)


# ---- The task
class TheTask(unittest.TestCase):
    def test_an_item_depends_on_seed_and_index_alone_also_in_loader_workers(self):
        items = list(DataLoader(ddp.SyntheticDataset(6, 50, seed=1), None, num_workers=2))

        longer, other = ddp.SyntheticDataset(9, 50, seed=1), ddp.SyntheticDataset(6, 50, seed=2)
        self.assertEqual(ddp_sums(items), ddp_sums(longer)[:6])
        self.assertEqual(len({*ddp_sums(longer), *ddp_sums(other)}), 15)

    def test_y_is_the_channel_of_x_with_the_largest_moving_sum(self):
        x, y = ddp.SyntheticDataset()[99]

        expected = F.avg_pool1d(x, 3, stride=1, padding=1).argmax(0)
        self.assertEqual((x.shape, x.dtype), ((3, 10000), torch.float32))
        self.assertTrue(torch.equal(y, expected))  # int64, too
        with self.assertRaises(IndexError):
            ddp.SyntheticDataset()[100]

    def test_the_net_gives_logits_for_every_class_and_position_also_negative_ones(self):
        logits = ddp.ConvNet(num_classes=5)(torch.randn(2, 3, 11))

        self.assertEqual(logits.shape, (2, 5, 11))
        self.assertLess(logits.min(), 0)

    def test_sums_count_the_labels_that_are_not_ignored(self):
        logits = torch.tensor([[[2.0, 0, 0], [0, 0, 0]]])
        y = torch.tensor([[0, 1, -100]])

        loss_sum, correct, labels = ddp.batch_sums(logits, y)

        assert_close(loss_sum, F.cross_entropy(logits, y) * 2)
        self.assertEqual((correct.item(), labels.item()), (1, 2))


def ddp_sums(samples):
    """Return the sum of x of each sample."""
    return [x.sum().item() for x, _ in samples]


# ---- A step
def uneven_batch():
    """Return 12 samples with unequally many labels."""
    return default_collate(uneven_data(12))


def masked_loss(logits, y):
    """A loss that makes ignored labels zero by a mask."""
    return (logits.sum(1) * (y != -100)).sum(), 0, (y != -100).sum()


class RandomStep(torch.optim.SGD):
    """An optimizer that moves every parameter at random."""

    def step(self):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter += torch.rand_like(parameter)


def draws_of_a_step():
    """Return (what the net draws in a step, the parameters after an optimizer has drawn)."""
    draws = []
    net = plain_net()
    net.register_forward_hook(lambda layer, args, output: draws.append(torch.rand(3)))
    x, y = torch.ones(1, 3, 40), torch.zeros(1, 40, dtype=torch.int64)
    for step in range(2):
        model = DistributedDataParallel(plain_net())
        model.module.register_forward_hook(lambda *args: draws.append(torch.rand(3)))
        ddp.train_step(model, RandomStep(model.parameters()), [(x, y)], seed=(0, step))
    moved = (model.module[0].bias - plain_net()[0].bias).detach()
    return draws, moved[:3]


class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the names of PyTorch's operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def watched_steps(micro_batch_size):
    """Make four steps: return how often gradients were all-reduced, operators, and their memory."""
    reduced = []

    def count(state, bucket):
        reduced.append(bucket.buffer().numel())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(first)

    def first(future):
        return future.value()[0]

    net = plain_net()
    ddp.convert_batch_norm(net)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    model.register_comm_hook(None, count)
    optimizer = torch.optim.SGD(net.parameters(), lr=1)
    x, y = uneven_batch()
    share = x[dist.get_rank() :: dist.get_world_size()], y[dist.get_rank() :: dist.get_world_size()]
    places = []
    for _ in range(4):  # DDP decides on its buckets after the first.
        micro_batches = ddp.split_share(share, 12, micro_batch_size)
        with Ops() as ops:
            ddp.train_step(model, optimizer, micro_batches, (0,), clip_grad_norm=1)
        places.append([parameter.grad.data_ptr() for parameter in net.parameters()])
    return len(reduced), set(ops.names), places[2:]


class TheStep(unittest.TestCase):
    def test_without_any_label_it_changes_nothing(self):
        x, y = uneven_batch()
        y[:] = -100
        unchanged = list(plain_net().parameters()), torch.zeros(3, dtype=torch.float64)

        for step in on_ranks(2, step_on_a_share, x, y, 3, batch_sums=masked_loss):
            assert_close(step, unchanged)

    def test_the_net_draws_other_numbers_on_each_rank_and_step_the_optimizer_the_same(self):
        (draws, moved), (other_draws, other_moved) = on_ranks(2, draws_of_a_step)

        drawn = {tuple(numbers.tolist()) for numbers in [*draws, *other_draws, moved]}
        self.assertEqual(len(drawn), 5)
        self.assertTrue(torch.equal(moved, other_moved))

    def test_gradients_are_all_reduced_once_a_step_where_they_lie_and_nothing_waits(self):
        for micro_batch_size in (12, 5, 1):
            for reduced, ops, (before, after) in on_ranks(2, watched_steps, micro_batch_size):
                self.assertEqual(reduced, 4)
                self.assertEqual(before, after)
                self.assertIn("aten.convolution_backward.default", ops)
                for name in ("aten._local_scalar_dense", "aten.nonzero", "aten.index.Tensor"):
                    self.assertNotIn(f"{name}.default", ops)

    def test_a_step_is_cut_into_micro_batches_alike_on_any_number_of_ranks(self):
        for step_size, product in itertools.product((24, 26, 31), (6, 12, 90)):
            expected = on_ranks(1, micro_batches_of, step_size, product)[0]
            for world_size in (2, 3):
                most = product // world_size
                ranks = on_ranks(world_size, micro_batches_of, step_size, most)

                parts = [sorted(sum(part, [])) for part in zip(*ranks, strict=True)]
                self.assertEqual(parts, expected)
                self.assertLessEqual(max(map(len, sum(ranks, []))), most)

    def test_no_micro_batch_is_empty(self):
        ranks = on_ranks(6, micro_batches_of, 26, 1)

        self.assertEqual({len(micro_batches) for micro_batches in ranks}, {26 // 6})
        self.assertEqual({len(part) for rank in ranks for part in rank}, {1, 2})


def micro_batches_of(step_size, micro_batch_size):
    """Return the positions of a step that are in each of this rank's micro-batches."""
    share = torch.arange(step_size)[dist.get_rank() :: dist.get_world_size()]
    micro_batches = ddp.split_share((share, share), step_size, micro_batch_size)
    return [x.tolist() for x, _ in micro_batches]


# ---- Evaluation and BatchNorm
def evaluation_of_unequal_buffers():
    """Evaluate a net whose BatchNorm has other statistics on each rank, one of them a slice."""
    net = nn.Sequential(plain_net(), nn.BatchNorm1d(3))
    net[1].running_mean = torch.arange(6.0)[::2]
    if dist.is_initialized():
        net[1].running_mean += dist.get_rank()
        share = list(ddp.SyntheticDataset(6, 40))[dist.get_rank() :: 2]
        return ddp.evaluate(net, DataLoader(share, 4), CPU)
    return loss_and_accuracy(net.eval(), ddp.SyntheticDataset(6, 40))


def graph_of_evaluation():
    """Return whether evaluate() makes a graph, and inference tensors."""
    net, outputs = plain_net(), []
    net.register_forward_hook(lambda layer, args, output: outputs.append(output))
    ddp.evaluate(net, DataLoader(ddp.SyntheticDataset(2, 40)), CPU)
    return outputs[0].requires_grad, outputs[0].is_inference()


def single_value():
    """Return what a single sample of features becomes, and the running statistics."""
    net = nn.Sequential(nn.BatchNorm1d(3))
    ddp.convert_batch_norm(net)
    return net(torch.ones(1, 3)).detach(), net[0].running_mean, net[0].running_var


def bfloat16_under_autocast(convert, x):
    """Return what BatchNorm gives for bfloat16 under autocast, and its variance."""
    net = net_with_batch_norm()
    if convert:
        ddp.convert_batch_norm(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, x_gradient, *_ = run_net(net, x, torch.ones(9, 12))
    return output, x_gradient, net[3].running_var


class LayerOfItsOwn(nn.BatchNorm1d):
    """A BatchNorm that does more."""

    def forward(self, x):
        return super().forward(x) + 1


class TheEvaluation(unittest.TestCase):
    def test_the_buffers_of_rank_0_count_also_a_slice_of_a_tensor(self):
        expected = evaluation_of_unequal_buffers()  # Here is no group.

        assert_close(on_ranks(2, evaluation_of_unequal_buffers), [expected] * 2)

    def test_without_any_sample_it_gives_nan(self):
        self.assertTrue(torch.tensor(on_ranks(1, evaluation, 0)).isnan().all())

    def test_it_makes_no_graph_and_no_inference_tensors(self):
        self.assertEqual(on_ranks(1, graph_of_evaluation), [(False, False)])

    def test_the_digest_covers_the_last_number_of_each_parameter_and_buffer(self):
        module = nn.Sequential(plain_net(), nn.BatchNorm1d(3))
        digests = {ddp.digest(module)}

        for tensor in module.state_dict().values():
            tensor[(-1,) * tensor.dim()] += 1
            digests.add(ddp.digest(module))

        self.assertEqual(len(digests), 1 + 4 + 5)  # of the convolutions, of BatchNorm


class TheBatchNorm(unittest.TestCase):
    def test_a_single_value_becomes_0_and_a_variance_of_0(self):
        [(output, mean, var)] = on_ranks(1, single_value)

        expected = torch.zeros(1, 3), torch.full((3,), 0.1), torch.full((3,), 0.9)
        assert_close((output, mean, var), expected)

    def test_under_autocast_it_has_pytorchs_dtype_and_float32_statistics(self):
        x = nine_samples().bfloat16()
        expected = bfloat16_under_autocast(False, x)

        [actual] = on_ranks(1, bfloat16_under_autocast, True, x)

        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)  # dtypes, too

    def test_a_layer_keeps_parameters_names_and_hooks_and_in_eval_mode_its_output(self):
        net, x = net_with_batch_norm(), torch.randn(2, 3, 2, 2)
        net[0].register_forward_hook(lambda layer, args, output: output + 1)
        before = net.state_dict()
        expected = net.eval()(x)

        ddp.convert_batch_norm(net)

        self.assertIs(type(net[3]), ddp.GlobalBatchNorm)
        self.assertEqual(list(net.state_dict()), list(before))
        self.assertTrue(torch.equal(net(x), expected))

    def test_layers_that_do_more_or_keep_no_statistics_stay_as_they_are(self):
        others = LayerOfItsOwn(3), nn.BatchNorm1d(3, track_running_stats=False), nn.SyncBatchNorm(3)
        net = nn.Sequential(*others)

        ddp.convert_batch_norm(net)

        types = [LayerOfItsOwn, nn.BatchNorm1d, nn.SyncBatchNorm]
        self.assertEqual([type(layer) for layer in net], types)


# ---- The number of GPUs changes the time, not the training
def uneven_task(args, device):
    """A net without BatchNorm, and samples with unequally many labels."""
    data = uneven_data(args.num_samples), ddp.SyntheticDataset(25, 40)
    return sgd_task(args, *data, plain_net())


class Augmented(ddp.SyntheticDataset):
    """Signals with numbers added that all three generators draw."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(()) + np.random.rand() + random.random(), y


def augmented_task(args, device):
    """The shipped net on augmented data, also to evaluate on."""
    task = ddp.make_task(args, device)
    return dataclasses.replace(task, train_set=Augmented(44, 64), val_set=Augmented(25, 64))


def shifts(seed, epoch):
    """Return what SeededItems draws for each of four samples of zeros."""
    items = ddp.SeededItems(Augmented(4, 8), seed)
    items.set_epoch(epoch)
    plain = ddp.SyntheticDataset(4, 8)
    return [round((items[i][0] - plain[i][0])[0, 0].item(), 4) for i in range(4)]


def scheduled_task(args, device):
    """A task with a schedule, two param groups and a collate_fn of its own."""
    net = plain_net()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]
    return ddp.Task(
        ddp.SyntheticDataset(44, 64),
        ddp.SyntheticDataset(25, 64, 1),
        net,
        torch.optim.SGD(groups, np.float64(args.lr)),  # NumPy's numbers are not saved.
        lr_factor=factor_of_epochs,
        collate_fn=halved,
    )


def factor_of_epochs(epochs):
    """A schedule: up during the first epoch, then down."""
    return np.minimum(epochs + 0.1, 2.2 - epochs)


def halved(samples):
    """A collate_fn that halves x."""
    x, y = default_collate(samples)
    return x / 2, y


def scheduled_plain_loop():
    """Return the parameters that scheduled_task must have, from a loop in plain PyTorch."""
    net, data = plain_net(), ddp.SyntheticDataset(44, 64)
    for epoch, samples in enumerate([*steps_in_order(44, 8, epoch)] for epoch in range(2)):
        samples_read = 0
        for indices in samples:
            x, y = halved([data[i] for i in indices])
            loss = F.cross_entropy(net(x), y)
            net.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            factor = factor_of_epochs(epoch + samples_read / 44)
            for layer, lr in ((net[0], 0.5), (net[2], 0.3)):
                torch.optim.SGD(layer.parameters(), lr * factor).step()
            samples_read += len(indices)
    return net.state_dict()


def steps_in_order(num_samples, batch, epoch, seed=0):
    """Return the samples of each step of an epoch, from PyTorch's sampler."""
    sampler = TorchSampler(range(num_samples), 1, 0, seed=seed)
    sampler.set_epoch(epoch)
    order = torch.tensor(list(sampler))
    full, left = divmod(num_samples, batch)
    sizes = [batch] * (full - 1) + [(batch + left + 1) // 2, (batch + left) // 2]
    if left == 0:
        sizes = [batch] * full
    return [step.tolist() for step in order.split(sizes)]


class TheNumberOfRanks(Test):
    def assert_same(self, trained, expected):
        """Assert that jobs on other numbers of ranks have the same epochs and parameters."""
        self.assertEqual(epochs_of(trained.out), epochs_of(expected.out))
        assert_close(trained.state_dict, expected.state_dict)

    def test_a_net_without_batch_norm_trains_the_same_with_any_micro_batch(self):
        for more in ("--num-samples 37", "--num-samples 47 --drop-last"):
            options = f"--global-batch-size 12 --epochs 2 --lr 0.5 {more} --micro-batch-size "
            expected = on_ranks(1, job, options + "12", uneven_task)[0]

            for world_size, micro_batch_size in ((1, 5), (3, 4), (5, 1)):
                with self.subTest(more, world_size=world_size):
                    here = f"{options}{micro_batch_size}"
                    self.assert_same(on_ranks(world_size, job, here, uneven_task)[0], expected)

    def test_with_batch_norm_it_is_the_same_where_ranks_times_micro_batch_is(self):
        for num_samples in (44, 27):  # The second has steps of 12, 8 and 7.
            options = f"{SMALL} --num-samples {num_samples} --global-batch-size 12"

            two = on_ranks(2, job, f"{options} --micro-batch-size 3")[0]
            self.assert_same(on_ranks(3, job, f"{options} --micro-batch-size 2")[0], two)

    def test_augmentation_is_the_same_on_any_number_of_ranks_and_loader_workers(self):
        options = "--length 64 --epochs 2 --num-workers"
        expected = on_ranks(1, job, f"{options} 0", augmented_task)[0]

        for world_size, num_workers in ((1, 2), (3, 0), (5, 0)):
            with self.subTest(world_size=world_size, num_workers=num_workers):
                trained = on_ranks(world_size, job, f"{options} {num_workers}", augmented_task)[0]
                self.assert_same(trained, expected)

    def test_augmentation_is_another_for_each_item_epoch_and_seed_but_not_in_evaluation(self):
        drawn = shifts(0, 0) + shifts(0, 1) + shifts(1, 0)
        out = on_ranks(1, job, "--length 64 --epochs 2 --lr 0", augmented_task)[0].out

        self.assertEqual(len(set(drawn)), 12)
        self.assertEqual(shifts(0, 1), drawn[4:8])
        epochs = re.findall(r"epoch \d \| loss (\S+)", out)
        self.assertNotEqual(*epochs)

    def test_numbers_of_a_seed_are_not_those_of_more_or_fewer(self):
        drawn = set()
        for numbers in ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (1,), (0, 1)):
            ddp.seed_generators(*numbers)
            drawn |= {torch.rand(()).item(), np.random.rand(), random.random()}

        self.assertEqual(len(drawn), 7 * 3)

    def test_schedule_and_clipping_are_those_of_a_plain_loop_also_resumed_on_4_ranks(self):
        options = "--global-batch-size 8 --epochs 2 --lr 0.3 --clip-grad-norm 0.05"
        resuming = f"{options} --checkpoint-every 1 --checkpoint {self.folder}/scheduled"
        expected = scheduled_plain_loop()

        on_1 = on_ranks(1, job, options, scheduled_task)[0]
        on_3 = on_ranks(3, job, resuming, scheduled_task, stop_at=4)[0]
        on_4 = on_ranks(4, job, f"{resuming} --lr 0.3", scheduled_task)[0]

        assert_close(on_1.state_dict, expected)
        assert_close(on_4.state_dict, expected)
        self.assertEqual((len(on_3.epochs), len(on_4.epochs)), (3, 9))


# ---- On the same number of ranks, the same bits
class Regularised(nn.Sequential):
    """A net with dropout and a layer that only training uses."""

    def forward(self, x):
        body, head = self
        logits = body(x)
        if self.training:
            logits = logits + F.dropout(head(x), 0.3)
        return logits


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


def random_task(args, device):
    """A task that draws random numbers in each item and step; its optimizer counts the steps."""
    net = Regularised(nn.Conv1d(3, 3, 3, padding=1), nn.Conv1d(3, 3, 1))
    data = Augmented(44, 8), ddp.SyntheticDataset(4, 8)
    return ddp.Task(*data, net, Counting(net.parameters(), args.lr))


class AfterAStop(Test):
    def test_a_job_that_draws_and_counts_ends_with_the_bits_of_the_uninterrupted_one(self):
        options = f"{SMALL} --global-batch-size 6"
        expected = on_ranks(3, job, options, random_task)[0].out
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/random"

        out = ""
        for stop_at in (3, 5, None):
            out += on_ranks(3, job, options, random_task, stop_at)[0].out

        self.assertEqual(out.count("resuming from"), 2)
        self.assertEqual(epochs_of(out), epochs_of(expected))
        self.assertEqual(digest_of(out), digest_of(expected))

    def test_stopped_in_evaluation_it_prints_the_epoch_from_the_sums_that_were_saved(self):
        options = f"{SMALL} --epochs 1 --checkpoint-every 1"
        expected = on_ranks(2, job, options.replace("--checkpoint-every 1", ""))[0].out
        options += f" --checkpoint {self.folder}/evaluation"

        on_ranks(2, job, options, task_that_stops_in_evaluation)
        resumed = on_ranks(2, job, options)[0]

        self.assertIn("epoch 0, 44 samples read", resumed.out)
        self.assertEqual(resumed.epochs, [])  # no step
        self.assertEqual(epochs_of(resumed.out), epochs_of(expected))
        self.assertEqual(digest_of(resumed.out), digest_of(expected))

    def test_a_finished_job_is_not_trained_again(self):
        options = f"{SMALL} --checkpoint {self.folder}/finished"
        first = on_ranks(2, job, options)[0]

        again = on_ranks(2, job, options)[0]

        self.assertEqual((again.epochs, again.out.count(" | ")), ([], 0))
        self.assertEqual(digest_of(again.out), digest_of(first.out))


def task_that_stops_in_evaluation(args, device):
    """The shipped task, whose validation data raises."""
    task = ddp.make_task(args, device)
    return dataclasses.replace(task, val_set=Interrupted())


class Interrupted(ddp.SyntheticDataset):
    """Data to evaluate on, of which nothing can be read."""

    num_samples = 25

    def __init__(self):
        super().__init__(25, 64)

    def __getitem__(self, index):
        raise InterruptedError


# ---- The checkpoint
def infinite_loss(logits, y):
    """A loss that is infinite, while its gradients are zero."""
    return 0 * logits.sum() + float("inf"), 0, len(y)


def loss_without_finite_gradient(logits, y):
    """A loss of zero, whose gradients are not numbers."""
    return (0 * logits.sum()).sqrt(), 0, len(y)


def task_with_loss(batch_sums, args, device):
    """The shipped task with another loss."""
    return dataclasses.replace(ddp.make_task(args, device), batch_sums=batch_sums)


def task_with(change, args, device):
    """The shipped task, changed in one way."""
    task = ddp.make_task(args, device)
    first, second, *others = task.module.parameters()
    if change == "order":
        return dataclasses.replace(task, optimizer=torch.optim.Adam([second, first, *others]))
    if change == "optimizer":
        return dataclasses.replace(task, optimizer=torch.optim.SGD(task.module.parameters()))
    if change == "data":
        return dataclasses.replace(task, train_set=list(task.train_set))
    task.module.register_buffer("mask", torch.zeros(3))
    return task


class TheCheckpoint(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.options = f"{SMALL} --global-batch-size 8 --checkpoint-every 2 --checkpoint"
        cls.path = cls.folder / "first"
        on_ranks(2, job, f"{cls.options} {cls.path}", stop_at=4)

    def test_it_holds_the_steps_up_to_the_last_that_was_to_be_saved(self):
        out = on_ranks(1, job, f"{self.options} {shutil.copy(self.path, self.folder / 'copy')}")

        self.assertIn("copy: epoch 0, 16 samples read", out[0].out)

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

    def test_a_write_that_fails_leaves_the_old_one_and_no_other_file(self):
        path = self.folder / "full"
        ddp.save_checkpoint(path, {"state": "old"})

        with mock.patch.object(os, "fsync", side_effect=OSError("disk full")):
            self.assertRaisesRegex(OSError, "disk full", ddp.save_checkpoint, path, {})
        with self.assertRaisesRegex(pickle.UnpicklingError, "numpy"):  # could not be read again
            ddp.save_checkpoint(path, {"state": np.float64(1)})

        self.assertEqual(ddp.load_checkpoint(path), {"state": "old"})
        self.assertEqual(list(self.folder.glob("full*")), [path])

    def test_two_writers_at_once_do_not_disturb_each_other(self):
        path = self.folder / "both"

        def write_another(file):
            with mock.patch.object(os, "fsync"):
                ddp.save_checkpoint(path, {"state": "of the other"})

        with mock.patch.object(os, "fsync", write_another):
            ddp.save_checkpoint(path, {"state": "of the slow one"})

        self.assertEqual(torch.load(path), {"state": "of the slow one"})

    def test_what_is_damaged_or_of_another_job_is_refused_with_the_difference_and_stays(self):
        whole, path = self.path.read_bytes(), self.folder / "refused"

        class Evil:
            def __reduce__(self):
                return os.makedirs, (f"{self.folder}/executed",)

        Evil.folder = self.folder
        weights, evil = io.BytesIO(), io.BytesIO()
        torch.save({"0.weight": torch.zeros(3)}, weights)
        torch.save(torch.load(self.path) | {"evil": Evil()}, evil)
        shipped = ddp.make_task
        for content, more, make_task, message in (
            (b"", "", shipped, "is damaged or not a checkpoint"),
            (whole[:5000], "", shipped, "is damaged or not a checkpoint"),
            (whole[:-1], "", shipped, "is damaged or not a checkpoint"),
            (evil.getvalue(), "", shipped, r"is damaged .*\(UnpicklingError\)"),
            (weights.getvalue(), "", shipped, "holds something else than a job"),
            (whole, "--num-samples 99", shipped, "of 44 samples there, but .* of 99 samples"),
            (whole, "--seed 99", shipped, "the seed is 0 there, but 99 here"),
            (whole, "", "data", "SyntheticDataset of 44 samples there, but list of 44"),
            (whole, "", "optimizer", "the optimizer is Adam there, but SGD here"),
            (whole, "", "order", r"group 0 is \['0.weight', .* here"),
            (whole, "", "buffer", r"the shape of mask is None there, but \[3\] here"),
        ):
            path.write_bytes(content)
            if isinstance(make_task, str):
                make_task = functools.partial(task_with, make_task)

            errors = on_ranks(2, error_of_job, f"{self.options} {path} {more}", make_task)

            for error in errors:
                self.assertRegex(error, f"^InputError: .*refused .*{message}")
            self.assertEqual(path.read_bytes(), content)
        self.assertFalse((self.folder / "executed").exists())

    def test_a_step_too_small_for_the_ranks_is_refused_and_nothing_is_written(self):
        path = self.folder / "small"
        options = f"{SMALL} --checkpoint {path} --checkpoint-every 1 --global-batch-size"
        on_ranks(1, job, f"{options} 40 --drop-last", task_that_stops_in_evaluation)
        content = path.read_bytes()

        errors = on_ranks(5, error_of_job, f"{options} 8")

        for error in errors:
            self.assertRegex(error, "a step of 4 samples is too small for 5 processes: try another")
        self.assertEqual(path.read_bytes(), content)
        self.assertIn("parameters", on_ranks(5, job, f"{options} 8 --drop-last")[0].out)

    def test_where_nothing_can_be_written_the_job_is_refused_before_the_first_step(self):
        for path in ("/proc/ck", f"{self.folder}/none/ck"):
            error = on_ranks(1, error_of_job, f"{SMALL} --checkpoint={path}")[0]

            self.assertRegex(error, f"^InputError: --checkpoint {path}: \\w+")

    def test_the_learning_rate_is_the_command_lines_other_settings_are_the_checkpoints(self):
        path = shutil.copy(self.path, self.folder / "lr")
        before = torch.load(path)

        trained = on_ranks(2, job, f"{self.options} {path} --lr 0")[0]

        after = torch.load(path)["optimizer"]["param_groups"][0]
        self.assertEqual(len(trained.epochs), 10)  # 12 of two epochs, without the 2 before
        self.assertTrue(torch.equal(before["module"]["0.weight"], trained.state_dict["0.weight"]))
        self.assertEqual(after | {"lr": 0.01}, before["optimizer"]["param_groups"][0])

    def test_a_loss_or_a_net_that_is_not_finite_ends_the_job_and_is_not_saved(self):
        for loss in (infinite_loss, loss_without_finite_gradient):
            path = self.folder / loss.__name__
            options = f"{SMALL} --checkpoint {path}"
            for more in (options, f"{options} --checkpoint-every 1"):
                task = functools.partial(task_with_loss, loss)

                for error in on_ranks(2, error_of_job, more, task):
                    self.assertRegex(error, "^FloatingPointError: the loss or a parameter is not")
                epoch, samples_read, sums = torch.load(path)["progress"]
                self.assertEqual((epoch, samples_read, sums.sum()), (0, 0, 0))


# ---- The job
def digest_of_a_plain_loop():
    """Return the digest of what a job of one rank trains, written without ddp_reference's loop."""
    ddp.seed_generators(7)
    data, net = ddp.SyntheticDataset(44, 64, seed=7), ddp.ConvNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for epoch in range(2):
        for indices in steps_in_order(44, 4, epoch, seed=7):
            x, y = default_collate([data[i] for i in indices])
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()  # of 256 labels, a power of 2: no bit differs from a sum / 256
            optimizer.step()
    return ddp.digest(net)


def job_with_a_clock(options):
    """Return what a rank prints on a terminal where each look at the clock is a second later."""
    seconds = itertools.count()
    with mock.patch.object(ddp.time, "perf_counter", lambda: next(seconds)):
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
    """A task whose data is a list of as many tensors, and says which process reads it."""
    data = [(torch.randn(3, 8), torch.randint(3, (8,))) for _ in range(1300)]
    task = sgd_task(args, data, data[:1], nn.Conv1d(3, 3, 1))
    return dataclasses.replace(task, collate_fn=collate_in_a_worker)


def collate_in_a_worker(samples):
    """A collate_fn that notes the processes in which it runs, in the last label of a sample."""
    x, y = default_collate(samples)
    if torch.utils.data.get_worker_info():
        workers.append(os.getpid())
        assert len(set(workers)) == 1, workers
        assert torch.utils.data.get_worker_info().num_workers == 1
    return x, y


workers = []


def features_task(args, device):
    """A task with BatchNorm on features, which refuses a single sample."""
    data = [(torch.randn(3), torch.tensor(i % 3)) for i in range(8)]
    return sgd_task(args, data, data, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def task_of(label, num_samples, num_val_samples, args, device):
    """A task of samples with the same label at each position."""
    data = [(torch.randn(3, 8), torch.full((8,), label))] * 99
    return sgd_task(args, data[:num_samples], data[:num_val_samples], ddp.ConvNet())


def error_of_unequal_ranks(options, *options_of_ranks):
    """Return the error of a job whose ranks have other options."""
    return error_of_job(f"{options} {options_of_ranks[dist.get_rank()]}", task_by_rank)


def task_by_rank(args, device):
    """A task whose net, on rank 1, has another shape, or its data another length, if asked for."""
    task = ddp.make_task(args, device)
    if dist.get_rank() == 2 and args.num_samples == 43:
        task = dataclasses.replace(task, val_set=ddp.SyntheticDataset(24, 64))
    return task


def draws_of_making_a_task(options):
    """Return what PyTorch, NumPy and Python draw where a task is made."""
    drawn = []

    def make_task(args, device):
        drawn.extend([torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()])
        return ddp.make_task(args, device)

    job(options, make_task)
    return drawn


class Telling(nn.Conv1d):
    """A layer that tells whether it trains, and the dtype of its output."""

    def forward(self, x):
        output = super().forward(x)
        print(f"training {self.training} {output.dtype}")
        return output


def telling_task(args, device):
    """A task whose net and loss tell how they run."""

    def sums(logits, y):
        print("loss in autocast", torch.is_autocast_enabled("cpu"))
        return ddp.batch_sums(logits, y)

    data = ddp.SyntheticDataset(4, 8), ddp.SyntheticDataset(4, 8)
    return sgd_task(args, *data, nn.Sequential(Telling(3, 3, 1)), batch_sums=sums)


class TheJob(Test):
    def test_one_rank_trains_what_a_plain_loop_does(self):
        expected = digest_of_a_plain_loop()

        for parallel in ("ddp", "dp"):
            options = f"{SMALL} --seed 7 --lr 0.02 --global-batch-size 4 --local-bn"
            [trained] = on_ranks(1, job, f"{options} --parallel {parallel}")
            self.assertIn(expected, trained.out)

    def test_data_parallel_adds_up_micro_batches_as_ddp_does(self):
        options = f"{SMALL} --local-bn --micro-batch-size 5 --parallel"

        ddp_job, dp_job = (on_ranks(1, job, f"{options} {name}")[0] for name in ("ddp", "dp"))

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
        net = plain_net()
        data = ddp.SyntheticDataset(44, 64), ddp.SyntheticDataset(25, 64, 1)
        numbers = [*loss_and_accuracy(net, data[0]), *loss_and_accuracy(net, data[1])]

        out = on_ranks(3, job, f"{SMALL} --lr 0", plain_task)[0].out

        line = "| loss {:.4f} hits {:.3f} | val_loss {:.4f} val_hits {:.3f} |"
        self.assertEqual(out.count(line.format(*numbers)), 2)

    def test_amp_runs_training_evaluation_and_loss_in_bfloat16(self):
        out = on_ranks(1, job, f"{SMALL} --amp", telling_task)[0].out

        self.assertEqual(out.count("training True torch.bfloat16"), 1 + 2)  # the first is undone
        self.assertEqual(out.count("training False torch.bfloat16"), 2)
        self.assertEqual(out.count("loss in autocast True"), 3 + 2)
        self.assertEqual(out.count("float32") + out.count("autocast False"), 0)

    def test_on_a_terminal_a_progress_line_redraws_itself(self):
        options = f"{SMALL} --global-batch-size 12"
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/clock"
        on_ranks(3, job, options, stop_at=3)

        out, *others = on_ranks(3, job_with_a_clock, options)

        self.assertIn("epoch 0 | 34/44 samples | 10.0 samples/s  \r", out)  # 10 of them now, in 1 s
        self.assertIn("epoch 1 | 44/44 samples | 11.0 samples/s  \r", out)  # in 4 s
        self.assertIn(" | 6.7 samples/s\n", out)  # epoch 0: 20 samples in 3 s
        self.assertIn(" | 8.8 samples/s\n", out)  # epoch 1: 44 samples in 5 s
        self.assertEqual(others, ["", ""])

    def test_a_kept_loader_worker_takes_2600_tensors_where_1024_files_may_be_open(self):
        options = "--epochs 2 --num-workers 1 --global-batch-size 130"

        [trained] = on_ranks(1, job_with_1024_files, options)

        self.assertEqual(len(trained.epochs), 20)

    def test_ranks_that_are_not_the_same_job_all_refuse_it_and_say_in_what_they_differ(self):
        for here, there, message in (
            ("--lr 0.01", "--lr 0.02", "lr is 0.02 there, but 0.01 here"),
            ("--num-samples 44", "--num-samples 40", "num_samples is 40 there, but 44 here"),
            ("--num-samples 43", "--num-samples 43", "validation samples is 24 there, but 25 here"),
        ):
            errors = on_ranks(3, error_of_unequal_ranks, SMALL, here, here, there)

            for error in errors:
                self.assertRegex(error, f"^InputError: rank 2 is of another job: .*{message}")

    def test_whatever_a_task_draws_is_the_same_on_all_ranks(self):
        one, other = on_ranks(2, draws_of_making_a_task, SMALL)

        self.assertEqual(one, other)

    def test_data_that_cannot_be_trained_on_is_refused_by_all_ranks(self):
        for label, num_samples, options, message in (
            (0, 0, "", "InputError: nothing to train on: no step of 24"),
            (0, 9, "--global-batch-size 10 --drop-last", "InputError: nothing to train on"),
            (-100, 8, "", "InputError: nothing to train on: no sample has a label"),
            (0, 5, "--global-batch-size 4 --epochs 1", "InputError: a step of 2 samples"),
            (0.5, 8, "", "TypeError: labels must be integers"),
        ):
            task = functools.partial(task_of, label, num_samples, 1)
            for error in on_ranks(3, error_of_job, options, task):
                self.assertRegex(error, f"^{message}")

    def test_a_rank_without_a_sample_to_evaluate_on_takes_part(self):
        task = functools.partial(task_of, 0, 8, 1)

        self.assertIn("epoch 0 | loss", on_ranks(2, job, "--epochs 1", task)[0].out)

    def test_with_local_bn_a_net_of_features_trains(self):
        options = "--epochs 1 --local-bn --global-batch-size 4"

        self.assertIn("epoch 0 |", on_ranks(2, job, options, features_task)[0].out)

    def test_local_bn_leaves_each_rank_its_own_statistics(self):
        options = "--epochs 1 --global-batch-size 8"
        for more, equal in (("", True), ("--local-bn", False)):
            one, other = on_ranks(2, means_after_steps, f"{options} {more}")
            self.assertEqual(one == other, equal)

    def test_drop_last_drops_no_full_step_and_no_validation_sample(self):
        options = "--num-samples 24 --global-batch-size 12 --epochs 1 --length 64 --lr 0"

        kept, dropped = (on_ranks(1, job, options + more)[0] for more in ("", " --drop-last"))

        self.assertEqual(dropped.epochs, [0, 0.5])
        self.assertEqual(epochs_of(dropped.out), epochs_of(kept.out))


def plain_task(args, device):
    """A task whose net has no BatchNorm, so that each sample is treated by itself."""
    data = ddp.SyntheticDataset(44, 64), ddp.SyntheticDataset(25, 64, 1)
    return sgd_task(args, *data, plain_net(), metric="hits")


def means_after_steps(options):
    """Return the running means of BatchNorm after each step of a job."""
    means = []

    def make_task(args, device):
        task = features_task(args, device)
        running_mean = task.module[1].running_mean
        task.optimizer.register_step_post_hook(lambda *args: means.append(running_mean.tolist()))
        return task

    job(options, make_task)
    return means


# ---- Tar shards
def npy(array):
    """Return the bytes of a .npy file."""
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


def tar_of(members):
    """Return the bytes of a tar file with these members, as webdataset writes it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def shard_of(samples, folder="long/" * 30):
    """Return a shard of (x, y) pairs, with long names and other members between."""
    members = {"README": b"no sample", ".hidden.x.npy": b"no sample"}
    for number, (x, y) in samples:
        members[f"{folder}{number:04d}.x.npy"] = npy(x.numpy())
        members[f"{folder}{number:04d}.json"] = b"{}"
        members[f"{folder}{number:04d}.y.npy"] = npy(y.numpy())
    return tar_of(members)


def upper(text, number):
    """A decode of one's own."""
    return text.decode().upper(), int(number)


class TheShards(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.data = ddp.SyntheticDataset(50, 64)
        samples = list(enumerate(cls.data))
        for name, part in (("b", samples[30:]), ("a", samples[:30])):
            (cls.folder / f"train-{name}.tar").write_bytes(shard_of(part))
        (cls.folder / "empty.tar").write_bytes(tar_of({}))

    def refusal(self, content):
        """Return the error for a shard with this content."""
        path = self.folder / "bad.tar"
        path.write_bytes(content)
        with self.assertRaises(ddp.InputError) as caught:
            ddp.ShardDataset([path])
        return str(caught.exception)

    def test_items_are_those_of_all_shards_in_the_order_of_their_names(self):
        dataset = ddp.ShardDataset([f"{self.folder}/train-*.tar", f"{self.folder}/empty.tar"])

        torch.testing.assert_close(list(map(dataset.__getitem__, range(50))), list(self.data))
        self.assertEqual((len(dataset), dataset.places.nbytes), (50, 50 * 40))
        torch.testing.assert_close(dataset[-1], self.data[49])

    def test_training_is_the_same_from_shards_on_any_number_of_ranks_and_loader_workers(self):
        expected = on_ranks(1, job, "--num-samples 50 --length 64 --epochs 2", task_without_shards)
        train = f"--shards {self.folder}/train-*.tar --val-shards {self.folder}/train-b.tar"
        options = f"{train} --epochs 2 --checkpoint-every 1 --checkpoint {self.folder}/ck"

        out = on_ranks(3, job, options, stop_at=3)[0].out
        resumed = on_ranks(2, job, f"{options} --num-workers 1")[0]

        self.assertEqual(epochs_of(out + resumed.out)[-2:], epochs_of(expected[0].out))
        assert_close(resumed.state_dict, expected[0].state_dict)

    def test_members_and_decode_of_ones_own_make_the_item(self):
        path = self.folder / "words.tar"
        path.write_bytes(tar_of({"v1.0/a.txt": b"ab", "v1.0/a.cls": b"3", "v1.0/a.x.y": b"more"}))

        self.assertEqual(ddp.ShardDataset([path], ("txt", "cls"), upper)[0], ("AB", 3))

    def test_a_shard_that_is_cut_off_or_damaged_in_a_header_is_refused_by_its_name(self):
        whole = shard_of([(0, self.data[0]), (1, self.data[1])])
        end = len(whole.rstrip(b"\0"))
        cuts = [whole[:length] for length in range(0, end, 64)]
        with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
            headers = [member.offset_data - 512 for member in tar]
        flips = [
            whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
            for header in headers
            for place in (header, header + 100, header + 124, header + 156)
        ]

        for content in (*cuts, *flips):
            self.assertIn("bad.tar is damaged or lacks a member", self.refusal(content))

    def test_what_lacks_a_member_or_is_not_there_is_refused_and_what_cannot_be_decoded_named(self):
        lacking = tar_of({"a.x.npy": b"", "b.x.npy": b"", "b.y.npy": b""})
        undecodable = self.folder / "object.tar"
        undecodable.write_bytes(tar_of({"a.x.npy": npy(np.array([{}])), "a.y.npy": b""}))

        self.assertIn("lacks a member: KeyError('y.npy')", self.refusal(lacking))
        with self.assertRaisesRegex(ddp.InputError, r"none-\*.tar .*No such file"):
            ddp.ShardDataset([f"{self.folder}/none-*.tar"])
        with self.assertRaisesRegex(ValueError, "object.tar, sample 0: Object arrays cannot be"):
            ddp.ShardDataset([undecodable])[0]


def task_without_shards(args, device):
    """The shipped task, evaluated on the last 20 of its samples."""
    task = ddp.make_task(args, device)
    return dataclasses.replace(task, val_set=Subset(task.train_set, range(30, 50)))


# ---- The README: what it shows is run, and each part of its table is taken out and used
README = (HERE / "README.md").read_text()
# What each part gives on a rank, where `m` is the part taken out or the whole file.
USES = {
    "sampler": lambda m, folder: list(m.DistributedSampler(range(10))),
    "steps": lambda m, folder: list(
        m.DistributedBatchSampler(m.DistributedSampler(range(10)), global_batch_size=4)
    ),
    "a step": lambda m, folder: use_step(m),
    "evaluation": lambda m, folder: m.evaluate(plain_net(), [uneven_batch()], CPU),
    "BatchNorm": lambda m, folder: use_batch_norm(m),
    "random items": lambda m, folder: m.SeededItems(Augmented(4, 8), 0)[2],
    "checkpoints": lambda m, folder: use_checkpoint(m, f"{folder}/{dist.get_rank()}"),
    "hangs": lambda m, folder: list(m.watched([1, 2], 300)),
    "shards": lambda m, folder: m.ShardDataset([f"{folder}/*.tar"])[0],
}


def use_step(module):
    """Return the parameters after a step of two micro-batches."""
    model = DistributedDataParallel(plain_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    micro_batches = module.split_share(uneven_batch(), 12 * dist.get_world_size(), 6)
    module.train_step(model, optimizer, micro_batches, seed=(0,))
    return list(model.module.parameters())


def use_batch_norm(module):
    """Return what BatchNorm over two ranks gives."""
    net = net_with_batch_norm()
    module.convert_batch_norm(net)
    return net(torch.arange(24.0).view(2, 3, 2, 2) ** dist.get_rank()).detach()


def use_checkpoint(module, path):
    """Return what is saved and loaded again."""
    module.save_checkpoint(path, {"rank": dist.get_rank()})
    return module.load_checkpoint(path)


def take_out(names):
    """Execute these definitions of the file, and its imports, in an empty module; return it."""
    source = SCRIPT.read_text()
    module = types.ModuleType("part")
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)) or (
            getattr(statement, "name", None) in names
        ):
            exec(ast.get_source_segment(source, statement), vars(module))
    return module


def use_part(name, definitions, folder):
    """Return what a part gives that is taken out, and what it gives in the file."""
    results = [USES[name](module, folder) for module in (take_out(definitions), ddp)]
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    return results


def side_of(diff, sign):
    """Return one side of a diff: the lines with this sign, and those with none."""
    return "".join(line[1:] for line in diff.splitlines(True) if line[0] in f" {sign}")


class TheReadme(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        blocks = re.findall(r"(?s)```(?:diff|python)\n(.*?)```", README)
        cls.diff, cls.diff_of_the_step, cls.my_job, cls.batch_sums, cls.exercises = blocks

    def test_the_sides_of_its_diffs_train_the_same(self):
        plain, parallel = side_of(self.diff, "-"), side_of(self.diff, "+")
        with_train_step = parallel
        for hunk in re.findall(r"(?:-.*\n)+(?:\+.*\n)+", self.diff_of_the_step):
            self.assertIn(side_of(hunk, "-"), parallel)
            with_train_step = with_train_step.replace(side_of(hunk, "-"), side_of(hunk, "+"))
        programs, results = [], []
        for name, side in enumerate((plain, parallel, with_train_step)):
            results.append(self.folder / f"{name}.pt")
            program = self.folder / f"{name}.py"
            program.write_text(side.replace("model.pt", str(results[-1])))
            launcher = [*TORCHRUN, "--standalone", "--nproc-per-node=2"] if name else []
            programs.append(start(*launcher, program, GLOO_SOCKET_IFNAME=LOOPBACK))
        for program in programs:
            finish(program)

        expected, *trained = map(torch.load, results)
        for parameters in trained:
            assert_close(parameters, expected)

    def test_its_script_stopped_on_3_ranks_and_resumed_on_2_ends_as_the_uninterrupted_job(self):
        script = self.folder / "my_job.py"
        script.write_text(self.my_job)
        task = functools.partial(task_of_script, script)
        options = "--global-batch-size 300 --epochs 1"
        expected = on_ranks(1, job, options, task)[0]
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/mine.pt"
        on_ranks(3, job, options, task, stop_at=3)

        out, _ = run(script, *options.split(), "--channels", 4, "--nproc-per-node", 2)

        self.assertIn("epoch 0, 600 samples read", out)
        self.assertEqual(epochs_of(out), epochs_of(expected.out))

    def test_its_regression_is_trained_and_printed_under_its_name(self):
        task = functools.partial(regression_task, self.batch_sums)

        one, three = (on_ranks(ranks, job, "--epochs 2", task)[0].out for ranks in (1, 3))

        self.assertRegex(one, r"absolute_error [0-9.]+ \| val_loss \S+ val_absolute_error")
        self.assertEqual(epochs_of(three), epochs_of(one))

    def test_each_part_that_its_table_lists_works_without_the_rest_of_the_file(self):
        (self.folder / "0.tar").write_bytes(shard_of(enumerate(ddp.SyntheticDataset(2, 8))))
        table = re.search(r"(?s)## Take a part out\n(.*?)\n## ", README)[1]
        rows = re.findall(r"(?m)^\| ([^|`]+) \| ((?:`\w+` ?)+)\|", table)

        self.assertEqual([name for name, _ in rows], list(USES))
        for name, definitions in rows:
            definitions = re.findall(r"\w+", definitions)
            for part, file in on_ranks(2, use_part, name, definitions, self.folder):
                torch.testing.assert_close(part, file, rtol=0, atol=0)

    def test_the_old_lines_of_its_exercises_stand_once_in_the_file(self):
        hunks = re.findall(r"(?m)^\d: .*\n((?:-.*\n)+)(?:\+.*\n)+", self.exercises)

        self.assertEqual(len(hunks), 7)
        for hunk in hunks:
            self.assertEqual(SCRIPT.read_text().count(side_of(hunk, "-")), 1)

    def test_the_tests_that_its_answers_name_exist(self):
        names = re.findall(r"(?m)^\| \d \|[^|]*\| `(\w+)` \|", README)

        self.assertEqual(len(names), 6)
        for name in names:
            self.assertRegex(pathlib.Path(__file__).read_text(), rf"def test_\w*{name}")


def task_of_script(path, args, device):
    """Return what a script's make_task makes, with the option of its own."""
    args.channels = 4
    return runpy.run_path(str(path))["make_task"](args, device)


def regression_task(batch_sums, args, device):
    """A task with the README's batch_sums."""
    x = torch.randn(120, 4)
    data = TensorDataset(x, x.square().sum(dim=1, keepdim=True))
    exec(batch_sums, names := {})
    options = {"batch_sums": names["batch_sums"], "metric": "absolute_error"}
    return sgd_task(args, data, data, nn.Linear(4, 1), **options)


# ---- Launching, failing, ending. What script() makes of each of these is a program that can be run
# by hand, beside ddp_reference.py.
KILL_WHILE_A_PROCESS_IS_IMPORTED = """
import multiprocessing
os.environ.setdefault("LAUNCHER", str(os.getpid()))  # The launcher comes here first.
parent = os.getppid()
if multiprocessing.current_process().name == os.environ["PROCESS"]:
    os.kill(int(os.environ["LAUNCHER"]) if "KILL_LAUNCHER" in os.environ else parent, 9)
    while os.getppid() == parent:
        pass
"""

SLOW = """
import threading
wait, read = threading.Event().wait, ddp.SyntheticDataset.__getitem__
def read_slowly(dataset, index):
    wait(0.15)
    return read(dataset, index)
ddp.SyntheticDataset.__getitem__ = read_slowly
def make_task(args, device):
    wait(4)
    return ddp.make_task(args, device)
"""

WAIT = "import threading; ddp.train = lambda *args: threading.Event().wait()"
INTERRUPT_ITSELF = """
def train(*args):
    print(os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
    os.kill(os.getpid(), signal.SIGINT)
ddp.train = train
"""

HANG_IN_THE_DATA = """
import threading
read = ddp.SyntheticDataset.__getitem__
def sleep_here(dataset, index):
    if torch.utils.data.get_worker_info() or dist.get_rank() == 1:
        threading.Event().wait()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return read(dataset, index)
ddp.SyntheticDataset.__getitem__ = sleep_here
def make_task(args, device):
    task = ddp.make_task(args, device)
    dist.barrier()  # Their seconds begin at once.
    return task
"""

TELL_ABOUT_A_RANK_AND_RAISE_ON_RANK_1 = """
import contextlib, socket
def train(*args):
    addresses = set()
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # no socket
            opened = socket.socket(fileno=os.dup(fd))
            if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                addresses.add(opened.getsockname()[0])
    group = torch.distributed.nn.functional.all_reduce.__defaults__[1]
    threads, interface = os.environ["OMP_NUM_THREADS"], os.environ.get("GLOO_SOCKET_IFNAME")
    text = f"{threads} threads, {interface}, listening on {addresses}, default group {group}\\n"
    os.write(1, text.encode())  # in one piece: ranks share the pipe
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("by rank 1 alone")
    dist.barrier()
ddp.train = train
if __name__ == "__main__":
    del os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(6)  # as on 6 cores
"""

KILL_OR_RAISE_ON_RANK_0 = """
train_step, steps = ddp.train_step, []  # It is killed at its fourth step.
def killed_step(*args, **options):
    steps.append(1)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1"
    if len(steps) == 4 and dist.get_rank() == 0 and not restarted:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(*args, **options)
ddp.train_step = killed_step
def train(*args, train=ddp.train):
    train(*args)
    if dist.get_rank() == 0:
        raise ValueError("at the end")
ddp.train = train
"""

TELL_THE_INTERFACE = """
def make_task(args, device):
    print("interface:", os.environ.get("NCCL_SOCKET_IFNAME"), flush=True)
    return ddp.make_task(args, device)
"""


LEARNED = r"epoch 5 .* val_accuracy 0.[89]"  # Guessing would be 0.333.
VERSION = re.escape(torch.__version__)
REPORT = rf"""^ddp on gloo, world size 2, cpu, global batch size 24, torch {VERSION}
(epoch \d \| loss \d\.\d+ accuracy \d\.\d+ \| val_loss \d\.\d+ val_accuracy \d\.\d+ \| \S+ samples/s
){{6}}parameters sha256 [0-9a-f]{{64}}
$"""


class TheLaunch(Test):
    """However a job ends, finish() sees all its processes end: they hold its pipes."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        on_1 = "--epochs", 1000000, "--nproc-per-node", 1
        slow = "--timeout", 3, "--global-batch-size", 1, "--num-samples", 25, "--length", 8
        cls.slow = start(cls.script(SLOW, "slow"), *on_1, *slow)
        cls.tmpdir = pathlib.Path(tempfile.mkdtemp(" # and space", dir=cls.folder))
        cls.main_job = start(SCRIPT, "--length", 300, TMPDIR=str(cls.tmpdir))
        cls.waiting = start(cls.script(WAIT, "waiting"), *on_1)
        own = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": f"{LOOPBACK},{LOOPBACK}"}
        cls.interrupted = start(cls.script(INTERRUPT_ITSELF, "interrupted"), *on_1, **own)
        killing = cls.script(KILL_WHILE_A_PROCESS_IS_IMPORTED, "killing"), *on_1, "--num-workers", 1
        rank, worker = {"PROCESS": "SpawnProcess-1"}, {"PROCESS": "SpawnProcess-1:1"}
        cls.rank_killed = start(*killing, **worker)
        cls.launcher_killed = [start(*killing, **at, KILL_LAUNCHER="1") for at in (rank, worker)]

    def test_the_main_job_reports_in_the_agreed_form_that_it_learns_and_leaves_no_file(self):
        out, err = finish(self.main_job)

        if "[Gloo]" in out:  # PyTorch 2.9 prints lines of gloo first, one in the other.
            out = out[out.index("ddp on") :]
        self.assertRegex(out, REPORT)
        self.assertRegex(out, LEARNED)
        self.assertEqual((err, list(self.tmpdir.glob("tmp*"))), ("", []))

    def test_a_rank_that_is_killed_is_named_and_a_loader_worker_that_is_imported_ends(self):
        _, err = finish(self.rank_killed, status=1)

        self.assertIn("rank 0 was ended by SIGKILL\n", err)

    def test_a_rank_or_a_loader_worker_ends_whose_launcher_is_killed_while_it_is_imported(self):
        for launcher in self.launcher_killed:
            out, _ = finish(launcher, status=-signal.SIGKILL)

            self.assertNotIn("epoch", out)

    def test_ctrl_c_that_the_launcher_alone_gets_ends_the_job_quietly(self):
        self.waiting.stdout.readline()  # It is said before the training.

        os.kill(self.waiting.pid, signal.SIGINT)

        self.assertEqual(finish(self.waiting, status=130), ("", ""))

    def test_sigint_to_one_rank_alone_ends_the_job_and_what_the_user_has_set_stayed(self):
        out, err = finish(self.interrupted, status=1)

        self.assertEqual(err, "rank 0 was ended by SIGINT\n")
        self.assertIn(f"3 {LOOPBACK},{LOOPBACK}\n", out)

    def test_no_batch_takes_too_long_in_a_slow_job_that_goes_on_until_ctrl_c(self):
        self.slow.stdout.readline()
        epoch = self.slow.stdout.readline()

        os.killpg(self.slow.pid, signal.SIGINT)

        _, err = finish(self.slow, status=130)
        self.assertEqual((epoch[:7], err), ("epoch 0", ""))


class AFailure(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        hanging = cls.script(HANG_IN_THE_DATA, "hanging"), "--timeout", 4, "--nproc-per-node"
        cls.hanging = start(*hanging, 3)
        cls.asleep = start(*hanging, 1, "--num-workers", 1)
        telling = TELL_ABOUT_A_RANK_AND_RAISE_ON_RANK_1
        refusing = cls.script(telling.replace("ValueError", "ddp.InputError"), "refusing")
        cls.refusing = start(refusing, "--nproc-per-node", 2)
        cls.without_val_shards = start(SCRIPT, "--shards", "x", "--checkpoint", cls.folder / "ck")
        cls.out, cls.err = run(cls.script(telling), status=1)

    def test_where_a_rank_sleeps_and_one_is_frozen_each_awake_says_where_in_one_piece(self):
        _, err = finish(self.hanging, status=1)

        stack = r"!\n((?:Thread .*\n(?:  File .*\n)+\n?)+)"
        timeouts = rf"^Timeout \(0:00:04\){stack}Timeout \(0:00:04\.100000\){stack}rank 0 was"
        waiting, sleeping = re.search(timeouts, err).groups()
        self.assertIn(" in data_parallel\n", waiting)
        self.assertIn(" in sleep_here\n", sleeping)
        self.assertIn("rank 0 was ended by SIGALRM\n", err)

    def test_where_a_loader_worker_sleeps_the_rank_says_that_it_waits_for_a_batch(self):
        _, err = finish(self.asleep, status=1)

        self.assertRegex(err, r"Timeout \(0:00:04\)!(.*\n)+  File .* in watched\n")
        self.assertIn("rank 0 was ended by SIGALRM\n", err)

    def test_ranks_share_the_cores_and_listen_on_the_loopback_and_no_default_holds_their_group(
        self,
    ):
        # The exit would abort if a default argument of PyTorch did: pytorch/pytorch#190489.
        told = f"3 threads, {LOOPBACK}, listening on {{'127.0.0.1'}}, default group None\n"

        self.assertEqual(self.out.count(told), 2)

    def test_a_rank_that_raises_or_refuses_its_input_is_the_only_one_that_says_so(self):
        _, by_one = finish(self.refusing, status=2)
        out, by_all = finish(self.without_val_shards, status=2)

        self.assertEqual(by_one, "refusing.py: error: by rank 1 alone\n")
        self.assertEqual(by_all, "ddp_reference.py: error: --shards and --val-shards go together\n")
        self.assertEqual((out.count("\n"), list(self.folder.glob("ck*"))), (1, []))
        self.assertRegex(
            self.err, r"^rank 1 failed:\nTraceback(.*\n)+ValueError: by rank 1 alone\n\n$"
        )
        self.assertEqual(self.err.count("Traceback"), 1)  # not that of rank 0, which lost rank 1


class UnderTorchrun(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        one_machine = *TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"
        script = cls.script(KILL_OR_RAISE_ON_RANK_0, "killed")
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {cls.folder}/killed".split()
        can_restart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        cls.killed = start(*one_machine, script, *options, **can_restart)
        store = f"--rdzv-conf=store_type=file --rdzv-endpoint={cls.folder}/store"
        options = f"{store} --rdzv-backend=c10d --nnodes=2 --nproc-per-node=1".split()
        agent = *TORCHRUN, *options, cls.script(TELL_THE_INTERFACE, "telling"), *SMALL.split()
        cls.agents = [start(*agent, GLOO_SOCKET_IFNAME=LOOPBACK) for _ in range(2)]
        [cls.digest] = digest_of(on_ranks(2, job, SMALL)[0].out)

    def test_a_killed_job_is_restarted_and_ends_as_the_uninterrupted_one(self):
        out, err = finish(self.killed, status=1)

        self.assertIn("epoch 1, 22 samples read", out)
        self.assertIn(self.digest, out)
        self.assertRegex(err, "(?s)Root Cause.*ValueError: at the end")  # torchrun's report

    def test_two_agents_train_what_one_launch_does_not_bound_to_the_loopback(self):
        out = "".join(finish(agent)[0] for agent in self.agents)

        self.assertIn(self.digest, out)
        self.assertEqual(out.count("interface: None"), 2)


# ---- The command line
class TheCommandLine(Test):
    """What cannot work is refused in one line that says what to do."""

    TORCHRUN = {
        "TORCHELASTIC_RUN_ID": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "3",
    }

    def assert_refused(self, options, message, **environ):
        """Assert that a launcher exits with status 2 after a line with this message."""
        parser = ddp.make_parser()
        ddp.add_task_options(parser)
        with (
            self.subTest(options),
            mock.patch.dict(os.environ, environ),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            with self.assertRaisesRegex(SystemExit, "^2$"):
                ddp.main(options.split(), ddp.make_task, parser)
            self.assertRegex(err.getvalue(), rf"^.* error: .*{message}.*\n$")
            self.assertEqual(out.getvalue(), "")

    def test_the_defaults_are_those_that_the_help_says(self):
        parser = ddp.make_parser()
        ddp.add_task_options(parser)
        defaults = vars(parser.parse_args([])).items()
        numbers = {name: str(value) for name, value in defaults if type(value) in (int, float)}

        option = r"--([a-z-]+) [A-Z_]+\s(?:(?!--)[^\[])*\[([\d.]+)\]"
        said = dict(re.findall(option, parser.format_help()))

        self.assertEqual({name.replace("-", "_"): value for name, value in said.items()}, numbers)

    def test_numbers_out_of_range(self):
        from_1 = "nproc-per-node epochs global-batch-size micro-batch-size checkpoint-every timeout"
        for name in f"{from_1} num-samples length num-workers seed lr clip-grad-norm".split():
            from_0 = name in ("num-workers", "seed", "lr", "clip-grad-norm")
            for value in ["-1", "nan", "inf", "x"] + ["0"] * (not from_0):
                self.assert_refused(f"--{name}={value}", f"argument --{name}: .*{value}")

    def test_options_that_cannot_work_here(self):
        would_hang = self.TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        for options, message, environ in (
            ("--checkpoint-every 1", "needs --checkpoint", {}),
            ("--parallel dp --amp", "one process, without --amp", {}),
            ("--parallel dp --nproc-per-node 2", "one process", {}),
            ("--parallel dp", "one process", self.TORCHRUN),
            ("--backend nccl", "2 and not 0; with --backend gloo", {}),
            ("--nproc-per-node 2", "give it before the file", self.TORCHRUN),
            ("", "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", would_hang),
            ("", "start the processes with torchrun", {"WORLD_SIZE": "2"}),
        ):
            self.assert_refused(options, message, **environ)

    def test_steps_that_are_too_small_for_the_processes(self):
        for options, message in {
            "--global-batch-size 1": "a step of 1 samples is too small for 2 processes: try",
            "--global-batch-size 1 --drop-last": "a step of 1 samples is too small",
            "--num-samples 23 --drop-last": "nothing to train on: no step of 24 samples",
        }.items():
            for error in on_ranks(2, error_of_job, options):
                self.assertIn(f"InputError: {message}", error)


# ---- On GPUs, if there are any
@unittest.skipUnless(GPUS, "needs a GPU")
class OnGPUs(Test):
    VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))

    def run_job(self, options, script=SCRIPT, status=0):
        return run(script, *options.split(), status=status, CUDA_VISIBLE_DEVICES=self.VISIBLE)

    def test_one_process_per_gpu_trains_as_one_process_does_also_if_killed(self):
        expected, _ = self.run_job(f"{SMALL} --nproc-per-node 1")
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {self.folder}/ck"
        killed, _ = self.run_job(options, self.script(KILL_OR_RAISE_ON_RANK_0), status=1)

        resumed, _ = self.run_job(options)

        self.assertIn(f"ddp on nccl, world size {GPUS}, cuda, ", killed)
        self.assertIn("epoch 1, 22 samples read", resumed)
        self.assertEqual(epochs_of(killed) + epochs_of(resumed)[-1:], epochs_of(expected))

    def test_data_parallel_learns_in_one_process(self):
        out, _ = self.run_job("--length 1000 --parallel dp")

        self.assertIn("dp on nccl, world size 1, cuda, ", out)
        self.assertRegex(out, LEARNED)

    def test_processes_share_a_gpu_if_gloo_is_asked_for(self):
        options = f"{SMALL} --nproc-per-node {GPUS + 1}"

        out, _ = self.run_job(f"{options} --backend gloo")
        _, err = self.run_job(options, status=2)

        self.assertIn(f"ddp on gloo, world size {GPUS + 1}, cuda, ", out)
        self.assertIn("--backend gloo", err)

    def test_a_launcher_that_shows_each_process_a_gpu_of_its_own_may_ask_for_nccl(self):
        script = self.script("ddp.run_rank = lambda *args: print(args[2].backend)")
        environ = {
            "RANK": "0",
            "LOCAL_RANK": "3",
            "CUDA_VISIBLE_DEVICES": self.VISIBLE.split(",")[0],
        }
        environ = TheCommandLine.TORCHRUN | {"LOCAL_WORLD_SIZE": "8"} | environ

        asked, _ = run(script, "--backend", "nccl", **environ)
        _, unasked = run(script, status=2, **environ)

        self.assertEqual(asked, "nccl\n")
        self.assertIn("NCCL needs a GPU for each process, 8 and not", unasked)


# ---- Your own job under the guarantees: bash run.sh test my_job.py [its options]
def nets_of_program(path, options, checkpoint=None, stop_at=None):
    """Run one rank of a program's job on its first samples.

    Returns the net before the first step and after each: the first 1000 numbers of each tensor, and
    with the first net what evaluation gives for it. Raises InputError for what cannot be tested.
    """
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    argv = [path, "--epochs=2", *options, f"--nproc-per-node={dist.get_world_size()}"]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(ddp, "launch") as launch,
        contextlib.suppress(SystemExit, FileNotFoundError),
    ):
        runpy.run_path(path, run_name="__main__")
    if not launch.called:
        raise ddp.InputError(f"{path} is not there, or does not call ddp_reference.main")
    args, make_task = launch.call_args.args
    if args.checkpoint or args.parallel == "dp":
        raise ddp.InputError("a test has no --checkpoint and no --parallel dp")
    args.checkpoint, args.checkpoint_every, args.num_workers = checkpoint, 1, 0
    nets = []

    def make_noted_task(args, device):
        task = make_task(args, device)
        first = range(9 * args.global_batch_size // 2 + 1)  # four steps and a half
        task.train_set = Subset(task.train_set, first[: len(task.train_set)])
        task.val_set = Subset(task.val_set, first[: len(task.val_set)])

        def note_net(*_):
            state = task.module.state_dict()
            nets.append({name: state[name].flatten()[:1000].tolist() for name in state})

        note_net()
        _, loader = ddp.make_loaders(task, device, args)
        nets[0]["evaluation"] = ddp.evaluate(task.module, loader, device, task.batch_sums, args.amp)
        task.optimizer.register_step_post_hook(note_net)
        return task

    job_of(args, make_noted_task, stop_at)
    return nets


def keeps(guarantee, expected, *others, tolerance=0.01):
    """Print whether jobs have the same nets, and if not, what differs first; return whether.

    tolerance: by how much of the way that it has gone a tensor may differ.
    """
    for nets, (step, net) in itertools.product(others, enumerate(expected)):
        for name in expected[-1]:  # The evaluation is in the first alone.
            moved = math.dist(net[name], expected[0][name])
            differs = math.dist(net[name], nets[step][name])
            if differs > tolerance * (moved + math.hypot(*net[name]) / 1e4):
                print(f"FAIL {guarantee}\n     after step {step} {name} ", end="")
                print(f"differs by {differs:.1e}, having moved {moved:.1e}")
                return False
    print("pass", guarantee)
    return True


def check_program(path, *options):
    """Print whether a program's job keeps four guarantees; return the exit status, 0 or 1."""

    def nets_on(world_size, checkpoint=None, stop_at=None):
        return on_ranks(world_size, nets_of_program, path, options, checkpoint, stop_at)[0]

    def nets_resumed_on(world_size):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = f"{folder}/ck"
            return nets_on(3, checkpoint, stop_at=2) + nets_on(world_size, checkpoint)[1:]

    one, two, three = map(nets_on, (1, 2, 3))
    if len(one) < 3:
        raise ddp.InputError("a test needs two steps: --epochs, --global-batch-size")
    kept = [
        keeps("evaluation is the same on 1, 2 and 3 processes", one[:1], two, three, tolerance=1),
        keeps("training is the same on 1, 2 and 3 processes", one, two, three),
        keeps("stopped on 3 in mid-epoch, resumed on 2: the same", one, nets_resumed_on(2)),
        keeps("stopped and resumed on 3: the same bits", three, nets_resumed_on(3), tolerance=0),
    ]
    return int(not all(kept))


class YourJob(Test):
    """What is said of the README's script, and of copies of it that have a fault each."""

    def assert_said(self, said, line="", replacement="", *options):
        """Assert what is printed for the script with a line replaced, and with which status."""
        readme = (HERE / "README.md").read_text()
        program = re.search(r"(?s)This is `my_job.py`.*?```python\n(.*?)```", readme)[1]
        path = self.folder / "my_job.py"
        path.write_text(program.replace(line, replacement))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            print("status", check_program(str(path), "--global-batch-size=6", *options))

        self.assertRegex(out.getvalue(), said)

    def test_the_readmes_script_keeps_all_guarantees(self):
        self.assert_said(r"^(pass .*\n){4}status 0")

    def test_what_makes_training_differ_is_found(self):
        mean = "batch_sums=lambda *batch: (nn.functional.cross_entropy(*batch), 0, len(batch[1])))"
        fails = r"FAIL training .*\n     after step \d \S+ differs by (.|\n)*status 1"
        for change in (
            ("nn.Flatten()", "nn.Flatten(), nn.Dropout()"),
            ("torch.rand(())", "__import__('random').SystemRandom().random()"),
            ("lr_factor=lr_factor)", mean),
            ("", "", "--micro-batch-size=4"),  # under BatchNorm
        ):
            with self.subTest(change):
                self.assert_said(fails, *change, "--epochs=1")

    def test_what_cannot_be_tested_is_refused(self):
        for message, *change in (
            ("does not call", "__main__", "__none__"),
            ("no --checkpoint", "", "", "--checkpoint=ck"),
            ("no --parallel dp", "", "", "--parallel=dp"),
            ("two steps", "", "", "--epochs=1", "--global-batch-size=1500"),
        ):
            with self.assertRaisesRegex(ddp.InputError, message):
                self.assert_said("", *change)


class Result(unittest.TextTestResult):
    """Counts the tests that passed: whether testsRun counts skipped ones depends on the Python."""

    passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`, or check a program."""
    if sys.argv[1:] and sys.argv[1].endswith(".py"):
        setUpModule()
        try:
            sys.exit(check_program(*sys.argv[1:]))
        except ddp.InputError as error:
            ddp.make_parser().error(error)
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result)
    result = unittest.main(exit=False, testRunner=runner).result
    bad = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    failed, skipped = len(bad), len(result.skipped)
    print(f"{result.passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0 or not result.passed + skipped)  # -k NAME may be mistyped


if __name__ == "__main__":
    main()
