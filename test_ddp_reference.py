"""The guarantees of ddp_reference.py. The names of the tests are the list of them.

    bash run.sh test                            # all; also: python -m pytest test_ddp_reference.py
    bash run.sh test -k Lesson                  # the classes or tests whose names hold a word
    bash run.sh test my_job.py [its options]    # the guarantees for a job of your own

First come six lessons: what data-parallel training guarantees. Each compares the job with what
must come out: PyTorch's own sampler, one process on the whole batch, or a job that was not stopped.
Their helpers stand below the rule. on_ranks(3, function, *args) calls a function in each of three
processes that form a group, and returns the three results. trained(3, options) runs the job on
three ranks and returns what rank 0 has: all that it printed (out), of that the lines of its epochs
and the digest of its net, and the net (state_dict). resumed(options, (4, 3), (2, None)) runs it on
four ranks, stops it when it would make its third step, and goes on from the checkpoint on two, to
the end. assert_close() allows for the rounding of float32, 1e-5. printed() is what a call prints.
"""

import ast
import concurrent.futures
import contextlib
import copy
import dataclasses
import faulthandler
import functools
import hashlib
import inspect
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, default_collate
from torch.utils.data import DistributedSampler as TorchSampler

import ddp_reference as ddp

CPU = torch.device("cpu")
GPUS = torch.cuda.device_count()
HERE = pathlib.Path(__file__).resolve().parent
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
TORCHRUN = "-m torch.distributed.run --local-addr=127.0.0.1"  # whatever the host's name is
SMALL = "--num-samples 44 --length 64 --epochs 2"  # steps of 22 and 22 samples


# ---- Lesson 1: which samples a rank reads
# DistributedSampler has the indices of PyTorch's own. DistributedBatchSampler deals out steps that
# are the same on any number of ranks. To break it, leave out `+ self.epoch` in order():
# test_the_indices_are_those_of_pytorchs_sampler turns red.
def steps_of_ranks(world_size, num_samples, batch, samples_read=0, **options):
    """Return for each step of an epoch the samples that all ranks read, sorted."""
    ranks = []
    for rank in range(world_size):
        sampler = ddp.DistributedSampler(range(num_samples), world_size, rank)
        batch_sampler = ddp.DistributedBatchSampler(sampler, batch, **options)
        batch_sampler.set_epoch(3, samples_read)
        ranks.append(list(batch_sampler))
        assert len(batch_sampler) == len(ranks[-1])
    return [sorted(sum(shares, [])) for shares in zip(*ranks, strict=True)]


class Lesson1Sampler(unittest.TestCase):
    def test_the_indices_are_those_of_pytorchs_sampler(self):
        booleans = True, False
        cases = [*itertools.product(range(20), range(1, 8), booleans, booleans)]
        cases.append((16385, 2, True, False))  # ours permutes int32, PyTorch's int64
        for n, num_replicas, shuffle, drop_last in cases:
            for rank in range(num_replicas):
                arguments = range(n), num_replicas, rank, shuffle, 7, drop_last
                ours, torchs = ddp.DistributedSampler(*arguments), TorchSampler(*arguments)
                for epoch in (0, 5):
                    ours.set_epoch(epoch)
                    torchs.set_epoch(epoch)

                    self.assertEqual(list(ours), list(torchs))
                    self.assertLessEqual(vars(torchs).items(), vars(ours).items())  # attributes

    def test_a_step_has_the_same_samples_on_any_number_of_ranks(self):
        expected = steps_of_ranks(1, num_samples=100, batch=24)

        for world_size in (2, 3, 5, 14):
            self.assertEqual(steps_of_ranks(world_size, num_samples=100, batch=24), expected)
        self.assertEqual([len(step) for step in expected], [24, 24, 24, 14, 14])
        self.assertEqual(sorted(sum(expected, [])), list(range(100)))  # each sample once


# ---- Lesson 2: seven cases of two ranks
# What goes wrong without a sampler and without set_epoch, and what becomes of samples that do not
# fill a batch: `bash run.sh cases`. To break it, write `if False:` for `if with_set_epoch:`:
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

    def test_the_cases_show_the_batches_of_pytorchs_sampler(self):
        ours = printed(ddp.main, ["cases"], None)

        with mock.patch.object(ddp, "DistributedSampler", TorchSampler):
            torchs = printed(ddp.main, ["cases"], None)

        self.assertEqual(ours, torchs)
        self.assertIn(self.CASE_3, ours)
        self.assertEqual(ours.count("case"), 7)


# ---- Lesson 3: a step
# Every rank ends a step with the parameters of one process that had the whole batch, however
# unequally many labels the ranks have. To break it, write 1 for `dist.get_world_size()` in
# train_step: test_on_any_number_of_ranks_a_step_is_that_of_one_process_on_the_whole_batch turns
# red. With two ranks a step goes like this; optimizer.step() is the same on both:
#
#     rank 0   samples 0 2 4 ... of the step   forward   backward ┐
#                                                                 ├ all-reduce   optimizer.step()
#     rank 1   samples 1 3 5 ... of the step   forward   backward ┘
def plain_net():
    """Return a net without BatchNorm, the same in every process, with a frozen parameter."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 3, padding=1))
    net[0].bias.requires_grad_(False)
    return net


def uneven_data(num_samples):
    """Return samples of 40 labels, of which from none to all are ignored."""
    data = list(ddp.SyntheticDataset(num_samples, 40))
    for i, (_, y) in enumerate(data):
        y[: i * 17 % 60] = -100  # 0, 17, 34, all, 8, 25, all, ...
    return data


def share_of(*batch):
    """Return this rank's share of a batch: every W-th sample, W being the world size."""
    return [tensor[dist.get_rank() :: dist.get_world_size()] for tensor in batch]


def step_on_a_share(x, y, micro_batch_size):
    """Make a step with SGD on this rank's share of a batch: return (parameters, the job's sums)."""
    model = DistributedDataParallel(plain_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1)  # Adam would hide a wrong factor.
    micro_batches = ddp.split_share(share_of(x, y), len(x), micro_batch_size)
    sums = ddp.train_step(model, optimizer, micro_batches, seed=(0,))
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
            for step in on_ranks(world_size, step_on_a_share, x, y, micro_batch_size):
                assert_close(step, expected)


# ---- Lesson 4: evaluation
# Loss and accuracy are those of one batch in one process, whatever the ranks' shares are. To break
# it, leave out `dist.all_reduce(sums)` in evaluate:
# test_on_any_number_of_ranks_it_gives_the_numbers_of_one_batch_in_one_process turns red.
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
    def test_on_any_number_of_ranks_it_gives_the_numbers_of_one_batch_in_one_process(self):
        for world_size, num_samples in ((1, 25), (2, 25), (3, 25), (3, 2)):  # 2: a rank has none
            expected = loss_and_accuracy(plain_net(), ddp.SyntheticDataset(num_samples, 40))

            for numbers in on_ranks(world_size, evaluation, num_samples):
                assert_close(numbers, expected)


# ---- Lesson 5: BatchNorm over the job
# GlobalBatchNorm is one nn.BatchNorm over what all ranks compute at once: the whole global batch,
# if a share is one micro-batch. To break it, leave out `+ (means - mean).square()` in
# job_statistics: test_outputs_gradients_and_statistics_are_those_of_one_process turns red.
def net_with_batch_norm(affine=True, momentum=0.3):
    """Return a net with BatchNorm in two dimensions, and on features."""
    options = {"affine": affine, "momentum": momentum, "eps": 0.01}
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
    def assert_same_as_one_process(self, x, tolerance=1e-5, **options):
        gradient = torch.randn(9, 12, generator=torch.Generator().manual_seed(1)) / 10
        expected = run_net(net_with_batch_norm(**options), x, gradient)

        ranks = on_ranks(3, share_through_net, x, gradient, options)

        outputs, gradients_of_x, *others = zip(*ranks, strict=True)
        assert_close(torch.cat(outputs), expected[0], tolerance)
        assert_close(torch.cat(gradients_of_x), expected[1], tolerance)
        for of_rank in zip(*others, strict=True):
            assert_close(of_rank, expected[2:], tolerance)

    def test_outputs_gradients_and_statistics_are_those_of_one_process(self):
        self.assert_same_as_one_process(nine_samples())

    def test_so_they_are_without_parameters_and_with_a_cumulative_average(self):
        self.assert_same_as_one_process(nine_samples(), affine=False, momentum=None)

    def test_so_they_are_far_from_zero_where_sums_of_squares_would_cancel(self):
        self.assert_same_as_one_process(1000 + nine_samples(), tolerance=1e-3)


def nine_samples():
    """Return random x, float32 (9, 3, 2, 2)."""
    return torch.randn(9, 3, 2, 2, generator=torch.Generator().manual_seed(0))


# ---- Lesson 6: the number of processes changes nothing, and a stopped job goes on
# On other numbers of ranks the epochs print the same, also after stops; on the same number each bit
# is the same. To break it, leave out `task.optimizer.load_state_dict` in resume:
# test_stopped_on_4_ranks_and_resumed_on_3_then_5_then_2_it_trains_the_same turns red. To see what
# the first backward is there for, leave out run_micro_batch() and backward() in data_parallel:
# test_stopped_and_resumed_on_as_many_ranks_it_ends_with_the_same_bits turns red, on three ranks.
class Lesson6NumberOfRanks(unittest.TestCase):
    def test_the_shipped_net_trains_the_same_on_1_2_3_and_5_ranks(self):
        for num_samples in (83, 96, 100):
            options = f"--num-samples {num_samples} --length 64 --epochs 2"
            expected = trained(1, options)

            for world_size in (2, 3, 5):
                ours = trained(world_size, options)
                with self.subTest(num_samples=num_samples, world_size=world_size):
                    self.assertEqual(ours.lines, expected.lines)
                    assert_close(ours.state_dict, expected.state_dict)

    def test_stopped_on_4_ranks_and_resumed_on_3_then_5_then_2_it_trains_the_same(self):
        options = "--num-samples 100 --length 64 --epochs 4"
        expected = trained(1, options)

        ours = resumed(options, (4, 3), (3, 5), (5, 6), (2, None))

        self.assertIn("epoch 2, 24 samples read", ours.out)  # 2 + 4 + 5 steps, of 5 in an epoch
        self.assertEqual(ours.lines, expected.lines)
        assert_close(ours.state_dict, expected.state_dict)

    def test_stopped_and_resumed_on_as_many_ranks_it_ends_with_the_same_bits(self):
        for world_size in (2, 3):
            options = f"{SMALL} --micro-batch-size 1 --global-batch-size {2 * world_size}"
            expected = trained(world_size, options)

            ours = resumed(options, (world_size, 3), (world_size, 7), (world_size, None))

            with self.subTest(world_size=world_size):
                self.assertEqual(ours.out.count("resuming from"), 2)
                self.assertEqual(ours.lines, expected.lines)
                self.assertEqual(ours.digest, expected.digest)


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


@functools.cache
def processes():
    """Up to six processes for on_ranks(), forked from one that has imported torch.

    torch._dynamo is what PyTorch imports to make the first optimizer of a process.
    """
    multiprocessing.set_forkserver_preload(["torch._dynamo"])
    context = multiprocessing.get_context("forkserver")
    return concurrent.futures.ProcessPoolExecutor(6, context, ddp.end_with_parent)


def as_rank(rank, world_size, path, function, args):
    """Return function(*args), called in a gloo group."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        result = function(*args)
        dist.barrier()
        return result
    except Exception as error:  # Its model would outlive the group; freeing it then may hang.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)


def on_ranks(world_size, function, *args):
    """Call a function on each rank of a group of 1 to 6 processes, and return the results.

    on_ranks(3, dist.get_rank) is [0, 1, 2].
    """
    with tempfile.TemporaryDirectory() as folder:
        call = world_size, f"{folder}/store", function, args
        ranks = [processes().submit(as_rank, rank, *call) for rank in range(world_size)]
        errors = [rank.exception() for rank in ranks if rank.exception()]
        if errors:  # A rank that has only lost another raises a RuntimeError.
            raise min(errors, key=lambda error: isinstance(error, RuntimeError))
        return [rank.result() for rank in ranks]


def trained(world_size, options, make_task=ddp.make_task, stop_at=None):
    """Train on so many ranks with these options, as job_of() does; return what rank 0 returns."""
    return on_ranks(world_size, job, options, make_task, stop_at)[0]


def resumed(options, *runs, make_task=ddp.make_task):
    """Train in several runs (world_size, stop_at); return the last result, with all lines.

    resumed(SMALL, (4, 3), (2, None)) is stopped on four ranks before its third step, and goes on.
    """
    with tempfile.TemporaryDirectory() as folder:
        options += f" --checkpoint-every 1 --checkpoint {folder}/ck"
        results = [trained(world_size, options, make_task, at) for world_size, at in runs]
    results[-1].lines = sum([result.lines for result in results], [])
    results[-1].out = "".join(result.out for result in results)
    return results[-1]


def parser_of_all_options():
    """Return the parser of the shipped job."""
    parser = ddp.make_parser()
    ddp.add_task_options(parser)
    return parser


def job(options, make_task=ddp.make_task, stop_at=None):
    """Run one rank of a job with these options, as job_of() does."""
    parser = parser_of_all_options()
    options += f" --timeout 120 --nproc-per-node {dist.get_world_size()}"
    args = parser.parse_args(shlex.split(options))
    ddp.decide_processes(args, parser.error)
    return job_of(args, make_task, stop_at)


def job_of(args, make_task, stop_at):
    """Run one rank of a job on a terminal, up to its end or before its step number `stop_at`.

    What stops it is lr_factor, which is called before each step. Returns what it printed (out), of
    that the epochs, up to the speed (lines), and the digest; and its net (state_dict).
    """
    result = types.SimpleNamespace()
    steps = itertools.count(1)

    def make_stopping_task(args, device):
        task = make_task(args, device)
        result.state_dict = task.module.state_dict()  # the net's own tensors, no copies

        def lr_factor(epochs):
            if next(steps) == stop_at:
                raise InterruptedError
            return task.lr_factor(epochs)

        return dataclasses.replace(task, lr_factor=lr_factor)

    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.suppress(InterruptedError),
    ):
        out.isatty = lambda: True
        ddp.train(args, CPU, make_stopping_task)
    result.out = out.getvalue()
    result.lines = re.findall(r"epoch \d+ \| loss.*(?= \|)", result.out)
    result.digest = re.findall(r"parameters sha256 \S+", result.out)
    return result


def error_of_job(options, make_task=ddp.make_task):
    """Return the error with which one rank of a job ends, as "ValueError: no sample"."""
    try:
        job(options, make_task)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def start(command, **environ):
    """Start a Python program with its output in pipes, in a process group of its own.

    finish(start("ddp_reference.py --epochs 1", OMP_NUM_THREADS="3")) is what it prints.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', HERE)}",
    }
    return subprocess.Popen(
        [sys.executable, *shlex.split(command)],
        cwd=HERE,
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


def run(command, status=0, **environ):
    """Run a Python program to its end, as in out, err = run("ddp_reference.py --epochs 1")."""
    return finish(start(command, **environ), status)


def assert_close(actual, expected, tolerance=1e-5):
    """Assert that numbers or tensors are equal but for the rounding of float32."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def printed(function, *args):
    """Call a function, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*args)
    return out.getvalue()


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
    ddp.main(sys.argv[1:], make_task, parser)
""")
        return shlex.quote(str(path))


# ---- The sampler and the steps
class TheSampler(unittest.TestCase):
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
        sampler = ddp.DistributedBatchSampler(ddp.DistributedSampler(range(5), 2, 0), 5)
        unshuffled = ddp.DistributedSampler(range(5), 2, 0, shuffle=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for epoch in range(3):
                sampler.set_epoch(epoch)
                list(sampler)
                list(unshuffled)

        with self.assertWarnsRegex(UserWarning, r"call set_epoch\(epoch\)") as warning:
            list(sampler)
        self.assertEqual(warning.filename, __file__)

    def test_a_rank_out_of_range_is_an_error_that_says_so(self):
        for rank in (-1, 2):
            with self.assertRaisesRegex(ValueError, f"rank {rank} is not one of 2"):
                ddp.DistributedSampler(range(5), 2, rank)

    def test_from_any_start_any_number_of_ranks_makes_the_steps_that_are_left(self):
        self.assertEqual(steps_of_ranks(1, 1, 8), [[0]])
        for drop_last, sizes in ((False, [8, 8, 6, 5]), (True, [8, 8, 8])):
            whole = steps_of_ranks(1, 27, 8, drop_last=drop_last)

            self.assertEqual([len(step) for step in whole], sizes)
            for done, world_size in itertools.product(range(len(whole) + 1), (1, 3, 4)):
                left = steps_of_ranks(world_size, 27, 8, sum(sizes[:done]), drop_last=drop_last)
                self.assertEqual(left, whole[done:])


# ---- The task
class TheTask(unittest.TestCase):
    def test_an_item_depends_on_seed_and_index_and_y_is_the_channel_of_the_largest_mean(self):
        x, y = ddp.SyntheticDataset(6, 50)[5]
        numbers = {x.mean().item()}
        for seed, index in ((0, 5), (1, 5), (0, 4)):
            numbers.add(ddp.SyntheticDataset(9, 50, seed)[index][0].mean().item())
        means = F.pad(x, (1, 1)).unfold(1, 3, 1).mean(2)

        self.assertEqual(len(numbers), 3)
        self.assertTrue(torch.equal(y, means.argmax(0)))


def changed(**fields):
    """Return a make_task: the shipped one, whose task gets other fields.

    optimizer: a function of the net's parameters and the learning rate.
    """
    return functools.partial(change_task, fields)


def change_task(fields, args, device):
    """Make the task of changed()."""
    task = ddp.make_task(args, device)
    # What is given to on_ranks() lies in memory that the ranks share.
    module = copy.deepcopy(fields.get("module", task.module))
    optimizer = fields.get("optimizer", torch.optim.Adam)(module.parameters(), args.lr)
    return dataclasses.replace(task, **fields | {"module": module, "optimizer": optimizer})


# ---- A step. What watches over train_step:
# bash run.sh test -k Lesson3 -k TheStep -k micro_batches -k draws_and_counts -k a_schedule
#     -k each_option -k amp_runs -k cannot_be_trained
class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the names of PyTorch's operators that are called."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def watched_steps():
    """Make four steps: return the last one's operators, and where a gradient lay after each."""
    model = DistributedDataParallel(plain_net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    share = share_of(*default_collate(uneven_data(12)))
    places = []
    for _ in range(4):
        with Ops() as ops:
            ops.names = []
            ddp.train_step(model, optimizer, ddp.split_share(share, 12, 1), (0,), clip_grad_norm=1)
        places.append(model.module[0].weight.grad.data_ptr())
    return ops.names, places


def micro_batches_of(step_size, micro_batch_size):
    """Return the positions of a step that are in each of this rank's micro-batches."""
    positions = torch.arange(step_size)
    share = share_of(positions, positions)
    return [x.tolist() for x, _ in ddp.split_share(share, step_size, micro_batch_size)]


class TheStep(unittest.TestCase):
    def test_gradients_are_all_reduced_once_a_step_where_they_lie_and_nothing_waits(self):
        for ops, places in on_ranks(2, watched_steps):
            self.assertEqual(ops.count("c10d.allreduce_.default"), 2)  # gradients and sums
            self.assertEqual(places[2], places[3])  # DDP decides on its buckets after the first.
            self.assertNotIn("aten._local_scalar_dense.default", ops)

    def test_a_step_is_cut_into_micro_batches_alike_on_any_number_of_ranks(self):
        for step_size, product in ((24, 6), (26, 12), (31, 6), (31, 90)):
            expected = on_ranks(1, micro_batches_of, step_size, product)[0]
            self.assertLessEqual(max(map(len, expected)), product)
            for world_size in (2, 3):
                ranks = on_ranks(world_size, micro_batches_of, step_size, product // world_size)

                parts = [sorted(sum(part, [])) for part in zip(*ranks, strict=True)]
                self.assertEqual(parts, expected)

    def test_no_micro_batch_is_empty(self):
        ranks = on_ranks(6, micro_batches_of, 26, 1)

        self.assertEqual({len(part) for rank in ranks for part in rank}, {1, 2})


# ---- Evaluation and BatchNorm
def buffer_after_evaluation():
    """Evaluate a net with a buffer, a slice, that is another on each rank; return the buffer."""
    net = nn.BatchNorm1d(3)
    net.running_mean = (torch.arange(6.0) + dist.get_rank())[::2]
    ddp.evaluate(net, [], CPU)
    return net.running_mean.tolist()


class TheEvaluation(unittest.TestCase):
    def test_the_buffers_of_rank_0_count_also_if_they_are_slices(self):
        self.assertEqual(on_ranks(2, buffer_after_evaluation), [[0, 2, 4]] * 2)


class TheBatchNorm(unittest.TestCase):
    def test_a_single_value_becomes_0_and_a_variance_of_0(self):
        x, gradient = nine_samples()[:1], torch.ones(1, 12)

        [(output, _, _, buffers)] = on_ranks(1, share_through_net, x, gradient, {})

        assert_close(output, torch.zeros(1, 12))
        assert_close(buffers["3.running_var"], torch.full((12,), 0.7))

    def test_of_bfloat16_the_statistics_are_float32_and_the_output_is_bfloat16(self):
        x, gradient = (10 + nine_samples()[:4]).bfloat16(), torch.ones(4, 12)
        expected = run_net(net_with_batch_norm(), x, gradient)

        [(output, _, _, buffers)] = on_ranks(1, share_through_net, x, gradient, {})

        assert_close(output, expected[0], tolerance=0.02)  # the dtype, too
        assert_close(buffers["0.running_mean"], expected[3]["0.running_mean"])

    def test_in_eval_mode_it_is_nn_batchnorm_and_layers_with_another_forward_stay(self):
        others = nn.BatchNorm2d(3, track_running_stats=False), nn.SyncBatchNorm(3)
        net, x = nn.Sequential(*others, *net_with_batch_norm()).eval(), torch.randn(2, 3, 2, 2)
        expected = net(x)

        ddp.convert_batch_norm(net)

        expected_types = [nn.BatchNorm2d, nn.SyncBatchNorm, ddp.GlobalBatchNorm]
        self.assertEqual([type(layer) for layer in net[:3]], expected_types)
        self.assertTrue(torch.equal(net(x), expected))


# ---- The number of GPUs changes the time, not the training
class Drawing:
    """Numbers that all three generators draw."""

    def __getitem__(self, index):
        return torch.rand(()).item() + np.random.rand() + random.random()


class Augmented(ddp.SyntheticDataset):
    """Signals with such numbers added."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + Drawing()[index], y


def factor_of_epochs(epochs):
    """A schedule: up during the first epoch, then down."""
    return np.minimum(epochs + 0.1, 2.2 - epochs)


def other_labels(samples):
    """A collate_fn that turns the labels round."""
    x, y = default_collate(samples)
    return x, 2 - y


def two_groups(parameters, lr):
    """Return an optimizer with two param groups."""
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr)


def scheduled_plain_loop():
    """Return the net that a job with the above must make, from a loop in plain PyTorch."""
    ddp.seed_generators(7)
    net, data = ddp.ConvNet(), ddp.SeededItems(Augmented(40, 64), 7)
    optimizer = two_groups(net.parameters(), 0.3)
    sampler = TorchSampler(data, 1, 0, seed=7)
    for epoch in range(2):
        data.set_epoch(epoch)
        sampler.set_epoch(epoch)
        batches = DataLoader(data, 8, sampler=sampler, collate_fn=other_labels)
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            for group, lr in zip(optimizer.param_groups, (0.5, 0.3), strict=True):
                group["lr"] = lr * factor_of_epochs(epoch + step / 5)
            optimizer.step()
    return net.state_dict()


class TheNumberOfRanks(Test):
    def test_micro_batches_change_nothing_under_batch_norm_if_ranks_times_their_size_stays(self):
        options = f"{SMALL} --num-samples 27 --global-batch-size 12 --micro-batch-size"  # 12, 8, 7

        two, three = (trained(*run) for run in ((2, f"{options} 3"), (3, f"{options} 2")))

        self.assertEqual(two.lines, three.lines)
        assert_close(two.state_dict, three.state_dict)

    def test_a_schedule_and_all_else_of_a_task_are_those_of_a_plain_loop_also_after_stops(self):
        own = {"train_set": Augmented(40, 64), "optimizer": two_groups, "collate_fn": other_labels}
        task = changed(lr_factor=factor_of_epochs, **own)
        options = f"{SMALL} --global-batch-size 8 --lr 0.3 --clip-grad-norm 0.05 --seed 7"

        ours = resumed(options, (3, 4), (1, None), make_task=task)

        assert_close(ours.state_dict, scheduled_plain_loop())

    def test_random_numbers_are_others_for_each_item_epoch_and_seed_and_for_fewer_numbers(self):
        drawn = set()
        for seed, epoch in ((0, 0), (0, 1), (1, 0)):
            items = ddp.SeededItems(Drawing(), seed)
            items.set_epoch(epoch)
            drawn |= {items[i] for i in range(4)}
        for numbers in ((0,), (0, 0)):
            ddp.seed_generators(*numbers)
            drawn.add(Drawing()[0])

        self.assertEqual(len(drawn), 3 * 4 + 2)


# ---- On the same number of ranks, the same bits
class CountingSteps(torch.optim.SGD):
    """An optimizer that counts its steps in its param group, and makes them smaller at random."""

    def step(self):
        [group] = self.param_groups
        group["steps"] = group.get("steps", 0) + 1
        group["lr"] *= torch.rand(()).item() / group["steps"]
        super().step()


def telling_sums(output, y):
    """The shipped loss, which tells how it runs and what it draws."""
    drawn = torch.rand(()).item(), np.random.rand(), random.random()
    kind = output.dtype, torch.is_autocast_enabled("cpu")
    print("training" if output.requires_grad else "evaluating", *kind, *drawn)
    return ddp.batch_sums(output, y)


class Interrupted(ddp.SyntheticDataset):
    """Data of which nothing can be read."""

    def __getitem__(self, index):
        raise InterruptedError


class AfterAStop(Test):
    def test_a_job_that_draws_and_counts_ends_with_the_bits_of_the_uninterrupted_one(self):
        net = nn.Sequential(nn.Dropout(0.3), nn.Conv1d(3, 3, 3, padding=1))
        own = {"module": net, "train_set": Augmented(44, 8), "optimizer": CountingSteps}
        task = changed(batch_sums=telling_sums, **own)
        options = f"{SMALL} --global-batch-size 6"  # 8 steps in an epoch
        expected = on_ranks(3, job, options, task)
        other_seed = trained(1, f"{options} --seed 1", task)

        ours = resumed(options, (3, 3), (3, 5), (3, None), make_task=task)

        self.assertEqual(ours.lines, expected[0].lines)
        self.assertEqual(ours.digest, expected[0].digest)
        drawn = [re.findall("training.*", rank.out) for rank in [*expected, other_seed]]
        # All ranks have made the task, and the backward that is undone, with the same numbers.
        self.assertEqual(len(set(sum(drawn, []))), 1 + 3 * 16 + 1 + 16)
        for rank in expected:
            assert_close(rank.state_dict, expected[0].state_dict)  # The optimizer drew the same.

    def test_stopped_in_evaluation_it_goes_on_there_and_when_it_has_ended_nowhere(self):
        options, task = f"{SMALL} --epochs 1", changed(val_set=Augmented(25, 64))
        expected = trained(2, options, task)
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/evaluation"
        trained(2, options, changed(val_set=Interrupted()))

        ours, again = (trained(2, options, task, stop_at=1) for _ in range(2))

        self.assertEqual((ours.lines, again.lines), (expected.lines, []))
        self.assertEqual((ours.digest, again.digest), (expected.digest, expected.digest))


# ---- The checkpoint
def infinite_loss(logits, y):
    """A loss that is infinite, while its gradients are zero."""
    return 0 * logits.sum() + float("inf"), 0, len(y)


def loss_without_finite_gradient(logits, y):
    """A loss of zero, whose gradients are not numbers."""
    return (0 * logits.sum()).sqrt(), 0, len(y)


class TheCheckpoint(Test):
    def test_at_every_moment_it_is_whole_also_with_two_writers_and_a_link_stays_a_link(self):
        link, path, seen = self.folder / "link", self.folder / "file", []
        link.symlink_to(path)
        ddp.save_checkpoint(path, "old")

        def write_another(file):
            seen.append(torch.load(path))  # what a kill at this moment would leave
            with mock.patch.object(os, "fsync"):
                ddp.save_checkpoint(path, "of the other")

        with mock.patch.object(os, "fsync", write_another):
            ddp.save_checkpoint(link, "of the slow one")
        with self.assertRaisesRegex(pickle.UnpicklingError, "numpy"):
            ddp.save_checkpoint(path, np.float64(1))  # It could not be read again.

        self.assertEqual([*seen, ddp.load_checkpoint(path)], ["old", "of the slow one"])
        self.assertEqual(list(self.folder.glob("file*")), [path])

    def test_where_nothing_can_be_written_the_job_is_refused(self):
        [error] = on_ranks(1, error_of_job, f"{SMALL} --checkpoint /none/ck")

        self.assertEqual(error, "InputError: --checkpoint /none/ck: No such file or directory")

    def test_what_is_damaged_or_of_another_job_is_refused_with_the_difference_and_stays(self):
        path, weights, code = self.folder / "ck", io.BytesIO(), io.BytesIO()
        options = f"{SMALL} --global-batch-size 7 --checkpoint {path}"
        trained(2, f"{options} --drop-last --checkpoint-every 3", changed(val_set=Interrupted()))
        whole = path.read_bytes()
        torch.save({}, weights)
        torch.save(print, code)
        later = nn.Sequential(nn.Identity(), *ddp.ConvNet())
        with_buffers = nn.Sequential(*ddp.ConvNet(), nn.BatchNorm1d(3, affine=False))
        for content, message, more, *task in (
            (b"", "ck is damaged or no checkpoint: EOFError", ""),
            (whole[:-1], "ck is damaged or no checkpoint", ""),
            (code.getvalue(), "ck is damaged or no checkpoint: UnpicklingError", ""),
            (weights.getvalue(), r"ck is of another job: KeyError\('identity'\)", ""),
            (whole, "ck is of another job: RuntimeError", "", changed(module=with_buffers)),
            (whole, "ck is of another job: the seed is 0 there, 99 here", "--seed 99"),
            (whole, "SyntheticDataset of 44 .*, list of 9", "", changed(train_set=uneven_data(9))),
            (whole, "Adam there, SGD here", "", changed(optimizer=torch.optim.SGD)),
            (whole, r"\('0.weight', .* there, \('1.weight', .* here", "", changed(module=later)),
            # It has read 42 of the 44 samples.
            (whole, "a step of 2 samples is too small for 3 processes: try another", ""),
        ):
            path.write_bytes(content)

            errors = on_ranks(3, error_of_job, f"{options} {more}", *task)

            for error in errors:
                self.assertRegex(error, f"^InputError: .*{message}")
            self.assertEqual(path.read_bytes(), content)

    def test_a_loss_or_a_net_that_is_not_finite_ends_the_job_and_is_not_saved(self):
        for loss in (infinite_loss, loss_without_finite_gradient):
            path = self.folder / loss.__name__
            options = f"{SMALL} --checkpoint-every 1 --checkpoint {path}"

            errors = on_ranks(2, error_of_job, options, changed(batch_sums=loss))

            for error in errors:
                self.assertRegex(error, "^FloatingPointError: the loss or a parameter is not")
            self.assertEqual(torch.load(path)["progress"][:2], (0, 0))


# ---- The job
def job_with_a_clock(options):
    """Return what a rank prints if each look at the clock is a second later."""
    with mock.patch.object(ddp.time, "perf_counter", itertools.count().__next__):
        return job(options).out


class Counting(list):
    """A dataset whose items are how many its process has read, and a random number."""

    read = 0

    def __getitem__(self, index):
        self.read += 1
        return torch.tensor(self.read), torch.rand(())


def epochs_read(num_workers):
    """Return the items of two epochs of a dataset of 300 tensors; 256 files may be open."""
    data = Counting(torch.zeros(1) for _ in range(300))
    task = ddp.Task(data, data, module=None, optimizer=None)
    args = ddp.make_parser().parse_args([f"--num-workers={num_workers}", "--micro-batch-size=1"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))  # as long as this process lives
    loader, _ = ddp.make_loaders(task, CPU, args)
    items = []
    for epoch in range(2):
        loader.dataset.set_epoch(epoch)
        loader.batch_sampler.set_epoch(epoch)
        items += [torch.stack(batch) for batch in loader]
    return items


def error_of_unequal_ranks(*jobs):
    """Return the error of a job of which each rank has other options or another task."""
    return error_of_job(*jobs[dist.get_rank()])


class TheJob(Test):
    def test_data_parallel_is_one_process_and_adds_up_micro_batches_as_ddp_does(self):
        options = f"{SMALL} --local-bn --micro-batch-size 5"
        expected = trained(1, options).digest[0]

        self.assertIn(expected, run(f"ddp_reference.py {options} --parallel dp")[0])

    def test_each_option_changes_what_is_trained(self):
        options = "epochs 2|global-batch-size 9|micro-batch-size 1|lr 0.1|drop-last|local-bn|amp|"
        options += "clip-grad-norm 0.01|seed 1|num-samples 40|length 65|epochs 1"

        digests = {
            trained(2, f"{SMALL} --epochs 1 --{option}").digest[0] for option in options.split("|")
        }

        self.assertEqual(len(digests), 12)

    def test_loss_metric_and_digest_are_those_of_the_whole_job(self):
        net = plain_net()
        data = ddp.SyntheticDataset(44, 64, 7), ddp.SyntheticDataset(25, 64, 8)
        numbers = [*loss_and_accuracy(net, data[0]), *loss_and_accuracy(net, data[1])]

        ours = trained(3, f"{SMALL} --lr 0 --seed 7", changed(module=net, metric="hits"))

        line = "| loss {:.4f} hits {:.3f} | val_loss {:.4f} val_hits {:.3f} |"
        self.assertEqual(ours.out.count(line.format(*numbers)), 2)
        contents = b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())
        digest = hashlib.sha256(contents).hexdigest()
        self.assertEqual(ours.digest, [f"parameters sha256 {digest}"])

    def test_amp_runs_training_evaluation_and_loss_in_bfloat16(self):
        out = trained(1, f"{SMALL} --amp", changed(batch_sums=telling_sums)).out

        self.assertEqual(out.count("training torch.bfloat16 True"), 1 + 4)  # the first is undone
        self.assertEqual(out.count("evaluating torch.bfloat16 True"), 4)
        self.assertEqual(out.count("torch."), 9)

    def test_on_a_terminal_a_progress_line_redraws_itself_and_the_speed_is_of_what_was_read(self):
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {self.folder}/clock"
        trained(3, options, stop_at=2)

        out, *others = on_ranks(3, job_with_a_clock, options)

        self.assertIn("epoch 0 | 44/44 samples  \r", out)
        self.assertEqual(re.findall(r"[0-9.]+(?= samples/s\n)", out), ["22.0", "44.0"])
        self.assertEqual(others, ["", ""])

    def test_a_loader_worker_is_kept_and_draws_the_same_with_more_tensors_than_open_files(self):
        expected, by_worker = (on_ranks(1, epochs_read, number)[0] for number in (0, 1))

        assert_close(by_worker, expected)

    def test_ranks_that_are_not_the_same_job_all_refuse_it_and_say_in_what_they_differ(self):
        for other, message in (
            ([f"{SMALL} --lr 0.02"], "lr is 0.02 there, 0.01 here"),
            ([SMALL, changed(val_set=Interrupted(24))], "samples is 24 there, 25 here"),
        ):
            errors = on_ranks(3, error_of_unequal_ranks, [SMALL], [SMALL], other)

            for error in errors:
                self.assertRegex(error, f"^InputError: rank 2 is of another job: .*{message}")

    def test_what_cannot_be_trained_on_is_refused_by_all_ranks(self):
        unlabelled, halves = (
            changed(train_set=[(torch.randn(3, 8), torch.full((8,), label))] * 8)
            for label in (-100, 0.5)
        )
        for error, options, *task in (
            # Its steps change nothing; otherwise this would be a FloatingPointError.
            ("InputError: nothing to train on: no sample", "--checkpoint-every 1", unlabelled),
            ("TypeError: labels must be integers; a regression has", "", halves),
            ("InputError: a step of 1 samples is too small", "--global-batch-size 1"),
            ("InputError: nothing to train on: not one step of 24", "--num-samples 23 --drop-last"),
        ):
            for said in on_ranks(2, error_of_job, options, *task):
                self.assertIn(error, said)


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


def shard_of(samples):
    """Return a shard of numbered (x, y) pairs, with long names and other members between."""
    members = {"README": b"no sample", ".hidden.x.npy": b"no sample"}
    for number, (x, y) in samples:
        sample = "long/" * 30 + f"v1.{number // 10}/{number % 10}"
        members[f"{sample}.x.npy"] = npy(x.numpy())
        members[f"{sample}.json"] = b"{}"
        members[f"{sample}.y.npy"] = npy(y.numpy())
    return tar_of(members)


class TheShards(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.data = ddp.SyntheticDataset(50, 64)
        samples = list(enumerate(cls.data))
        for name, part in (("b", samples[30:]), ("a", samples[:30])):
            (cls.folder / f"train-{name}.tar").write_bytes(shard_of(part))

    def shard(self, content, *options):
        """Return the dataset of a shard with this content."""
        path = self.folder / "one.tar"
        path.write_bytes(content)
        return ddp.ShardDataset([path], *options)

    def test_training_from_shards_in_the_order_of_their_names_is_that_from_their_samples(self):
        task = changed(train_set=self.data, val_set=Subset(self.data, range(30, 50)))
        expected = trained(1, "--epochs 2", task)
        (self.folder / "empty.tar").write_bytes(tar_of({}))
        shards = f"'{self.folder}/train-*.tar' {self.folder}/empty.tar"
        options = f"--shards {shards} --val-shards {self.folder}/train-b.tar --epochs 2"

        ours = resumed(options, (3, 4), (1, None))

        self.assertEqual(ddp.ShardDataset(shlex.split(shards)).places.nbytes, 50 * 48)
        self.assertEqual(ours.lines, expected.lines)
        assert_close(ours.state_dict, expected.state_dict)

    def test_members_and_decode_of_ones_own_make_the_item(self):
        content = tar_of({"a.jpg": b"ab", "a.cls": b"3", "a.x.y": b""})

        shard = self.shard(content, ("x.y", "jpg", "cls"), lambda *contents: contents)

        self.assertEqual(shard[0], (b"", b"ab", b"3"))

    def test_a_shard_that_is_cut_off_or_damaged_in_a_header_is_refused_by_its_name(self):
        whole = shard_of(enumerate(ddp.SyntheticDataset(2, 64)))
        bad = [whole[:length] for length in range(0, len(whole.rstrip(b"\0")), 64)]
        for place in (1024, 1124, 1148, 1180):  # name, mode, size and kind in the second header
            bad.append(whole[:place] + b"?" + whole[place + 1 :])

        for content in bad:
            with self.assertRaisesRegex(ddp.InputError, "one.tar is damaged or lacks a member"):
                self.shard(content)

    def test_what_lacks_a_member_or_is_not_there_is_refused_and_what_cannot_be_decoded_named(self):
        undecodable = tar_of({"a.x.npy": npy(np.array([{}])), "a.y.npy": b""})

        with self.assertRaisesRegex(ddp.InputError, r"lacks a member: KeyError\('y.npy'\)"):
            self.shard(tar_of({"a.x.npy": b"", "b.x.npy": b"", "b.y.npy": b""}))
        with self.assertRaisesRegex(ddp.InputError, r"none-\*.tar .*No such file"):
            ddp.ShardDataset([f"{self.folder}/none-*.tar"])
        with self.assertRaisesRegex(ValueError, "one.tar, sample 0: Object arrays cannot be"):
            self.shard(undecodable)[0]


# ---- The README: what it shows is run
README = (HERE / "README.md").read_text()
BLOCKS = re.findall(r"(?s)```(?:diff|python)\n(.*?)```", README)
DIFF, CHANGES, MY_JOB, BATCH_SUMS, EXERCISES = BLOCKS
SOURCE = (HERE / "ddp_reference.py").read_text()


def side_of(diff, sign):
    """Return one side of a diff: the lines with this sign, and those with none."""
    return "".join(line[1:] for line in diff.splitlines(True) if line[0] in f" {sign}")


class TheReadme(Test):
    def test_the_sides_of_its_diffs_train_the_same(self):
        plain, parallel = side_of(DIFF, "-"), side_of(DIFF, "+")
        with_changes = parallel
        for change in re.split(r"(?m)^\d: .*\n", CHANGES)[1:]:
            self.assertIn(side_of(change, "-"), with_changes)
            with_changes = with_changes.replace(side_of(change, "-"), side_of(change, "+"))

        expected = self.saved_by(plain, world_size=1)

        assert_close(self.saved_by(parallel, world_size=2), expected)
        assert_close(self.saved_by(with_changes, world_size=2), expected)

    def saved_by(self, program, world_size):
        """Return the parameters that a program of the README saves."""
        script, model = self.folder / "many.py", self.folder / "model.pt"
        script.write_text(program.replace(model.name, str(model)))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        call = functools.partial(run_under_torchrun, script, world_size, store.port)
        list(processes().map(call, range(world_size)))
        return torch.load(model)

    def test_its_regression_has_sums_of_squares_errors_and_numbers(self):
        exec(BATCH_SUMS, names := {})

        sums = names["batch_sums"](torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [1.0]]))

        self.assertEqual(sums, (4 + 1, 2 + 1, 2))

    def test_each_part_that_its_table_lists_needs_nothing_else_of_the_file(self):
        table = re.search(r"(?s)## Take a part out\n(.*?)\n## ", README)[1]
        parts = re.findall(r"(?m)^[^|`]+ \| ((?:`\w+` ?)+)\|", table)
        own = set(re.findall(r"(?m)^(?:def|class) (\w+)", SOURCE))

        self.assertEqual(len(parts), 8)
        for part in parts:
            names = set(re.findall(r"\w+", part))
            source = "\n".join(inspect.getsource(getattr(ddp, name)) for name in names)
            used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
            self.assertEqual(used & own - names, set())

    def test_the_old_lines_of_its_exercises_stand_once_in_the_file_and_each_names_a_test(self):
        old_lines = re.findall(r"(?m)^-(.*\n)", EXERCISES)
        names = re.findall(r"(?m)^\+.*  # \d (\w+)$", EXERCISES)
        tests = pathlib.Path(__file__).read_text()

        self.assertEqual((len(old_lines), len(names)), (7, 7))
        for line, name in zip(old_lines, names, strict=True):
            self.assertEqual(SOURCE.count(line), 1)
            self.assertRegex(tests, rf"(def test_|class )\w*{name}")


def run_under_torchrun(script, world_size, port, rank):
    """Run a program as one of torchrun's processes, which find each other in torchrun's store."""
    environ = {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{world_size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
    }
    with mock.patch.dict(os.environ, environ):
        runpy.run_path(str(script))


# ---- Launching, failing, ending. What script() makes of each of these is a program that can be run
# by hand, beside ddp_reference.py.
END_WHILE_A_LOADER_WORKER_IS_IMPORTED = """
import multiprocessing
os.environ.setdefault("LAUNCHER", str(os.getpid()))  # The launcher comes here first.
parent = os.getppid()
if multiprocessing.current_process().name == "SpawnProcess-1:1":
    print(os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"], flush=True)
    if "KILL_LAUNCHER" in os.environ:
        os.kill(int(os.environ["LAUNCHER"]), signal.SIGKILL)
    else:
        os.kill(parent, signal.SIGINT)
    while os.getppid() == parent:
        pass
"""

SLOW = """
import threading
wait, read = threading.Event().wait, ddp.SyntheticDataset.__getitem__
def read_slowly(dataset, index):
    wait(0.2)
    return read(dataset, index)
ddp.SyntheticDataset.__getitem__ = read_slowly
def make_task(args, device):
    wait(5)
    return ddp.make_task(args, device)
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

KILL_THEN_RAISE_ON_RANK_0 = """
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
        on_1 = "--epochs 1000000 --nproc-per-node 1"
        slow = f"{on_1} --timeout 4 --global-batch-size 1 --num-samples 25 --length 8"
        cls.slow = start(f"{cls.script(SLOW, 'slow')} {slow}")
        cls.tmpdir = pathlib.Path(tempfile.mkdtemp(" # and space", dir=cls.folder))
        cls.main_job = start("ddp_reference.py --length 300", TMPDIR=str(cls.tmpdir))
        ending = f"{cls.script(END_WHILE_A_LOADER_WORKER_IS_IMPORTED)} {on_1} --num-workers 1"
        own = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": f"{LOOPBACK},{LOOPBACK}"}
        cls.rank_interrupted = start(ending, **own)
        cls.launcher_killed = start(ending, KILL_LAUNCHER="1")
        store = f"--rdzv-conf=store_type=file --rdzv-endpoint={cls.folder}/store"
        agent = f"{TORCHRUN} {store} --rdzv-backend=c10d --nnodes=2 --nproc-per-node=1"
        telling = f"{agent} {cls.script(TELL_THE_INTERFACE, 'telling')} {SMALL}"
        cls.agents = [start(telling, GLOO_SOCKET_IFNAME=LOOPBACK) for _ in range(2)]

    def test_the_main_job_reports_its_epochs_learns_and_leaves_no_file(self):
        out, err = finish(self.main_job)

        out = re.sub(r"\[Gloo\].*\n+", "", out)  # PyTorch 2.9 prints such lines between.
        self.assertRegex(out, REPORT)
        self.assertRegex(out, LEARNED)
        self.assertEqual((err, list(self.tmpdir.glob("tmp*"))), ("", []))

    def test_a_loader_worker_ends_whose_rank_or_launcher_ends_while_it_is_imported(self):
        out, err = finish(self.rank_interrupted, status=1)
        finish(self.launcher_killed, status=-signal.SIGKILL)

        self.assertIn("process 0 terminated with signal SIGINT\n", err)
        self.assertIn(f"3 {LOOPBACK},{LOOPBACK}\n", out)  # What the user has set stays.

    def test_a_slow_job_does_not_time_out_and_ends_quietly_if_its_launcher_gets_ctrl_c(self):
        while not self.slow.stdout.readline().startswith("epoch 0"):
            self.assertIsNone(self.slow.poll())

        os.kill(self.slow.pid, signal.SIGINT)

        self.assertEqual(finish(self.slow, status=130)[1], "")

    def test_two_agents_are_not_bound_to_the_loopback_and_train_what_one_launch_does(self):
        out = "".join(finish(agent)[0] for agent in self.agents)

        self.assertIn(trained(2, SMALL).digest[0], out)
        self.assertEqual(out.count("interface: None"), 2)


class AFailure(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        hanging = cls.script(HANG_IN_THE_DATA, "hanging")
        cls.hanging = start(f"{hanging} --timeout 4 --nproc-per-node 3")
        telling = TELL_ABOUT_A_RANK_AND_RAISE_ON_RANK_1
        cls.refusing = start(cls.script(telling.replace("Value", "ddp.Input"), "refusing"))
        save = f"--checkpoint-every 1 --checkpoint {cls.folder}/ck"
        cls.without_val_shards = start(f"ddp_reference.py --shards x {save}")
        killed = cls.script(KILL_THEN_RAISE_ON_RANK_0 + TELL_THE_INTERFACE, "killed")
        restarting = f"{TORCHRUN} --standalone --nproc-per-node=2 --max-restarts=1 {killed}"
        restarting += f" {SMALL} {save}-of-killed"
        cls.killed = start(restarting, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        cls.out, cls.err = run(cls.script(telling), status=1)

    def test_where_a_rank_sleeps_and_one_is_frozen_each_awake_says_where_in_one_piece(self):
        _, err = finish(self.hanging, status=1)

        stack = r"!\n((?:Thread .*\n(?:  File .*\n)+\n?)+)"
        timeouts = rf"^Timeout \(0:00:04\){stack}Timeout \(0:00:04\.100000\){stack}process 0 "
        waiting, sleeping = re.search(timeouts, err).groups()
        self.assertIn(" in data_parallel\n", waiting)
        self.assertIn(" in sleep_here\n", sleeping)
        self.assertIn("process 0 terminated with signal SIGALRM\n", err)

    def test_ranks_share_the_cores_and_listen_on_the_loopback_and_no_default_holds_their_group(
        self,
    ):
        # The exit would abort if a default argument of PyTorch did: pytorch/pytorch#190489.
        told = f"3 threads, {LOOPBACK}, listening on {{'127.0.0.1'}}, default group None\n"

        self.assertEqual(self.out.count(told), 2)

    def test_a_rank_that_raises_or_refuses_its_input_is_the_only_one_that_says_so(self):
        _, by_one = finish(self.refusing, status=2)
        out, by_all = finish(self.without_val_shards, status=2)

        self.assertEqual(by_one, "error: by rank 1 alone\n")
        self.assertEqual(by_all, "error: --shards and --val-shards go together\n")
        self.assertEqual((out.count("epoch"), (self.folder / "ck").exists()), (0, False))
        raised = r"\s+-- Process 1 .*\nTraceback(.*\n)+ValueError: by rank 1 alone\s+"
        self.assertRegex(self.err, rf"^{raised}$")
        self.assertEqual(self.err.count("Traceback"), 1)  # not that of rank 0, which lost rank 1

    def test_torchrun_restarts_a_killed_job_on_the_loopback_to_the_end_of_the_uninterrupted_one(
        self,
    ):
        out, err = finish(self.killed, status=1)

        self.assertIn("epoch 1, 22 samples read", out)
        self.assertIn(f"interface: {LOOPBACK}\n", out)
        self.assertIn(trained(2, SMALL).digest[0], out)
        self.assertRegex(err, "(?s)Root Cause.*ValueError: at the end")  # torchrun's report


# ---- The command line
class TheCommandLine(Test):
    """What cannot work is refused in one line that says what to do."""

    TORCHRUNS_ENVIRON = {
        "TORCHELASTIC_RUN_ID": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "3",
    }

    def assert_refused(self, options, message, **environ):
        """Assert that a launcher exits with status 2 after a line with this message."""
        with (
            self.subTest(options),
            mock.patch.dict(os.environ, environ),
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            with self.assertRaisesRegex(SystemExit, "^2$"):
                ddp.main(options.split(), ddp.make_task, parser_of_all_options())
            self.assertRegex(err.getvalue(), rf"^.* error: .*{message}.*\n$")

    def test_numbers_out_of_range(self):
        from_1 = "nproc-per-node epochs global-batch-size micro-batch-size checkpoint-every timeout"
        from_0 = "num-workers seed lr clip-grad-norm"
        for lowest, names in ((1, f"{from_1} num-samples length"), (0, from_0)):
            for name in names.split():
                for value in (lowest - 1, -1, "nan", "inf", "x"):
                    self.assert_refused(f"--{name}={value}", f"argument --{name}: .*{value}")
                parser_of_all_options().parse_args([f"--{name}={lowest}"])

    def test_without_options_the_data_are_100_samples_of_10000_positions(self):
        args = parser_of_all_options().parse_args([])

        self.assertEqual((args.num_samples, args.length), (100, 10000))

    def test_options_that_cannot_work_here(self):
        would_hang = self.TORCHRUNS_ENVIRON | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        for options, message, environ in (
            ("--checkpoint-every 1", "needs --checkpoint", {}),
            ("--parallel dp --amp", "one process, without --amp", {}),
            ("--parallel dp --nproc-per-node 2", "one process", {}),
            ("--backend nccl", "there are 0: try --backend gloo", {}),
            ("--nproc-per-node 2", "give it before the file", self.TORCHRUNS_ENVIRON),
            ("", "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", would_hang),
            ("", "start the processes with torchrun", {"WORLD_SIZE": "2"}),
        ):
            self.assert_refused(options, message, **environ)


# ---- On GPUs, if there are any
@unittest.skipUnless(GPUS, "needs a GPU")
class OnGPUs(Test):
    VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))

    def run_job(self, options, script="ddp_reference.py", status=0):
        return run(f"{script} {options}", status, CUDA_VISIBLE_DEVICES=self.VISIBLE)

    def test_one_process_per_gpu_trains_as_one_process_does_also_if_killed(self):
        expected, _ = self.run_job(f"{SMALL} --nproc-per-node 1")
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {self.folder}/ck"
        killed, _ = self.run_job(options, self.script(KILL_THEN_RAISE_ON_RANK_0), status=1)

        ours, _ = self.run_job(options)

        self.assertIn(f"ddp on nccl, world size {GPUS}, cuda, ", killed)
        self.assertIn("epoch 1, 22 samples read", ours)
        lines = re.compile(r"epoch \d \|.*(?= \|)")
        self.assertEqual(lines.findall(killed + ours), lines.findall(expected))

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
        script = self.script("ddp.run_rank = lambda *args: print(args[1].backend)")
        environ = TheCommandLine.TORCHRUNS_ENVIRON | {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}
        environ["CUDA_VISIBLE_DEVICES"] = self.VISIBLE.split(",")[0]

        asked, _ = run(f"{script} --backend nccl", **environ)
        _, unasked = run(script, status=2, **environ)

        self.assertEqual(asked, "nccl\n")
        self.assertIn("NCCL needs a GPU for each process", unasked)


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
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(path, run_name="__main__")
    if not launch.called:
        raise ddp.InputError(f"{path} does not call ddp_reference.main")
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
                print(
                    f"FAIL {guarantee}\n     after step {step} {name} "
                    f"differs by {differs:.1e}, having moved {moved:.1e}"
                )
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
        path = self.folder / "my_job.py"
        path.write_text(MY_JOB.replace(line, replacement))
        options = "--global-batch-size=6", *options
        out = printed(lambda: print("status", check_program(str(path), *options)))

        self.assertRegex(out, said)

    def test_the_readmes_script_keeps_all_guarantees(self):
        self.assert_said(r"^(pass .*\n){4}status 0")

    def test_what_makes_training_differ_is_found(self):
        mean = "batch_sums=lambda *batch: (nn.functional.cross_entropy(*batch), 0, len(batch[1])))"
        fails = r"FAIL training .*\n     after step \d \S+ differs by (.|\n)*status 1"
        for change in (
            ("nn.Flatten()", "nn.Flatten(), nn.Dropout()"),
            ("torch.rand(())", "__import__('random').SystemRandom().random()"),
            ("lr_factor=lambda epochs: 1 - epochs / args.epochs)", mean),
            ("", "", "--micro-batch-size=4"),  # under BatchNorm
        ):
            with self.subTest(change):
                self.assert_said(fails, *change, "--epochs=1")

    def test_what_cannot_be_tested_is_refused(self):
        for message, *change in (
            ("does not call", "__main__", "__none__"),
            ("no --checkpoint and no --parallel", "", "", "--checkpoint=ck"),
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
        except (ddp.InputError, FileNotFoundError) as error:
            ddp.make_parser().error(error)
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result)
    result = unittest.main(exit=False, testRunner=runner).result
    failed, skipped = len(result.failures + result.errors), len(result.skipped)
    print(f"{result.passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0 or not result.passed + skipped)  # -k NAME may be mistyped


if __name__ == "__main__":
    main()
