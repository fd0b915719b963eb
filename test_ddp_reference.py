"""The guarantees of ddp_reference.py. The names of the tests are the list of them.

    bash run.sh test                             # all; also: python -m pytest test_ddp_reference.py
    python test_ddp_reference.py -k TheSampler   # one class, or all names that hold a word

To learn what data-parallel training guarantees, begin with TheStep, then read TheNumberOfRanks and
AfterAStop. Of the helpers you need two: on_ranks() calls a function in each process of a group, and
job() runs one rank of ddp_reference's own loop.

The oracles: torch's own sampler, one process on the whole batch, a job that was not interrupted.
"""

import concurrent.futures
import contextlib
import datetime
import functools
import io
import itertools
import multiprocessing
import os
import pathlib
import re
import runpy
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
from torch.autograd.profiler import profile
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate
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


def as_rank(rank, world_size, path, function, args):
    """Return function(*args), called in a gloo group."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    store, timeout = dist.FileStore(path, world_size), datetime.timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        result = function(*args)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def on_ranks(world_size, function, *args):
    """Call function(*args) on each rank of a group of 1 to 6 processes, and return the results."""
    with tempfile.TemporaryDirectory() as folder:
        call = world_size, f"{folder}/store", function, args
        ranks = [processes().submit(as_rank, rank, *call) for rank in range(world_size)]
        return [rank.result() for rank in ranks]


def job(options, task=ddp.make_task, stop_at=None, terminal=False):
    """Run one rank of a job, to its end or until it would make its step number `stop_at`.

    Returns what it printed (out), the tensors of its net at the end (state_dict), and for each step
    the sum of x (x_sums) and the number of labels, ignored ones included (labels).
    """
    options += f" --nproc-per-node {dist.get_world_size()}"
    args = ddp.make_parser().parse_args(options.split())
    ddp.check_processes(args, refuse=None)  # There is nothing to refuse.
    ddp.check_batches(args, refuse=None)
    result = types.SimpleNamespace(x_sums=[], labels=[])
    train_step = ddp.train_step

    def noting_step(model, optimizer, x, y, *args):
        result.state_dict = model.module.state_dict()  # the net's own tensors, no copies
        if len(result.x_sums) + 1 == stop_at:
            raise InterruptedError
        result.x_sums.append(x.sum().item())
        result.labels.append(y.numel())
        return train_step(model, optimizer, x, y, *args)

    with (
        mock.patch.multiple(ddp, make_task=task, train_step=noting_step),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.suppress(InterruptedError),
    ):
        out.isatty = lambda: terminal
        ddp.train(args, CPU)
    result.out = out.getvalue()
    return result


def job_on_ranks(world_size, options, task=ddp.make_task, stop_at=None):
    """Return what job() returns on rank 0 of so many ranks."""
    return on_ranks(world_size, job, options, task, stop_at)[0]


def error_of_job(options, task=ddp.make_task):
    """Return the error with which one rank of a job ends."""
    try:
        job(options, task)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def job_of_script(path, options, stop_at=None):
    """Run job() with the functions of ddp_reference that a user's script sets."""
    with mock.patch.dict(vars(ddp)):
        runpy.run_path(path)
        return job(options, ddp.make_task, stop_at)  # make_task is the script's now


def lines_without_speed(out):
    """Return what a job printed of its epochs, up to the speed, and its digest."""
    return re.findall(r"epoch .* val_accuracy \S+|parameters .*", out)


def start(*command, **environ):
    """Start a Python program with its output in pipes, in a process group of its own."""
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
    """Return (stdout, stderr) of a program, once every process that holds them has ended."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with process, contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, f"status {process.returncode}\n{out}\n{err}"
    return out, err


def run(*command, status=0, **options):
    """Run a Python program to its end: return (stdout, stderr)."""
    return finish(start(*command, **options), status)


def plain_net():
    """Return a net without BatchNorm, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 3, 3, padding=1))


def with_sgd(args, train_set, val_set, net):
    """Return what make_task returns."""
    return train_set, val_set, net, torch.optim.SGD(net.parameters(), args.lr)


def sgd_task(args):
    """A task whose net has no BatchNorm, so that each sample is treated by itself."""
    data = ddp.SyntheticDataset(44, 64), ddp.SyntheticDataset(25, 64, 1)
    return with_sgd(args, *data, plain_net())


def telling_task(args):
    """A task whose net prints, in each forward, whether it trains and what its logits are.

    Four words: training, dtype, requires_grad, is_inference.
    """

    def tell(net, args, logits):
        print(net.training, logits.dtype, logits.requires_grad, logits.is_inference())

    task = sgd_task(args)
    task[2].register_forward_hook(tell)
    return task


def uneven_data(num_samples):
    """Return samples of 40 labels, of which from none to all are ignored."""
    data = list(ddp.SyntheticDataset(num_samples, 40))
    for i, (_, y) in enumerate(data):
        y[: i * 17 % 60] = -100  # 0, 17, 34, all, 8, 25, all, ...
    return data


def assert_close(actual, expected):
    """Assert that numbers or tensors are equal but for the rounding of float32."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def task_of(label, num_val_samples, args):
    """A task of 8 samples with the same label at each position."""
    data = [(torch.randn(3, 8), torch.full((8,), label))] * 8
    return with_sgd(args, data, data[:num_val_samples], ddp.ConvNet())


def loss_and_accuracy(module, data):
    """Return what evaluation must give, from one batch in one process."""
    x, y = default_collate(list(data))
    logits = module(x)
    accuracy = (logits.argmax(1) == y).double().mean()
    return [F.cross_entropy(logits, y).item(), accuracy.item()]


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
    def write(cls, text):
        """Write a program, and return its path."""
        path = cls.folder / "my_job.py"
        path.write_text(text)
        return str(path)

    @classmethod
    def script(cls, change):
        """Write a program that changes ddp_reference and calls its main, as users' scripts do."""
        return cls.write(f"""
import os, signal, sys
import torch
import torch.distributed as dist
import ddp_reference as ddp
{change}
if __name__ == "__main__":
    sys.exit(ddp.main(sys.argv[1:]))
""")


# ---- The sampler
def order_of_job(n, num_replicas, start=0, **options):
    """Return the indices that all ranks read in epoch 3, in the order of the job's steps."""
    ranks = []
    for rank in range(num_replicas):
        sampler = ddp.DistributedSampler(range(n), num_replicas, rank, **options)
        sampler.set_epoch(3, start)
        ranks.append(list(sampler))
        assert len(sampler) == len(ranks[-1])
    turns = itertools.zip_longest(*ranks)
    return [index for turn in turns for index in turn if index is not None]


class TheSampler(unittest.TestCase):
    def assert_same_as_torch(self, *arguments):
        ours, torchs = ddp.DistributedSampler(*arguments), TorchSampler(*arguments)
        self.assertEqual(list(ours), list(torchs))  # of epoch 0, before any set_epoch
        ours.set_epoch(5)
        torchs.set_epoch(5)

        self.assertEqual(list(ours), list(torchs))
        self.assertEqual(vars(ours) | vars(torchs), vars(ours))  # and the same attributes

    def test_it_has_the_indices_and_attributes_of_torchs_sampler_in_every_small_case(self):
        booleans = True, False
        cases = itertools.product(range(20), range(1, 8), booleans, booleans)
        for n, num_replicas, shuffle, drop_last in cases:
            for rank in range(num_replicas):
                seed = n % 3
                self.assert_same_as_torch(range(n), num_replicas, rank, shuffle, seed, drop_last)

    def test_it_has_the_indices_of_torchs_sampler_around_the_size_of_its_chunks(self):
        for n in (16383, 16384, 16385, 100_003):
            self.assert_same_as_torch(range(n), 2, 1)  # chunks of 8192, and padding

    def test_pytorchs_int32_and_int64_permutations_are_the_same(self):
        for n in (10, 100_003, 3_000_000):
            torch.manual_seed(n)
            int32 = torch.randperm(n, dtype=torch.int32)
            torch.manual_seed(n)
            int64 = torch.randperm(n)

            self.assertTrue(torch.equal(int32, int64))

    def test_after_any_start_any_number_of_ranks_reads_the_rest_in_the_same_order(self):
        for n, num_replicas, shuffle in itertools.product((1, 7, 24), range(1, 7), (True, False)):
            order = order_of_job(n, 1, shuffle=shuffle)
            for start in range(n + 1):
                read = functools.partial(order_of_job, n, num_replicas, start, shuffle=shuffle)
                rest = order[start:]
                divisible = len(rest) // num_replicas * num_replicas
                repeated = (order * 7)[: -len(rest) % num_replicas]  # of one sample perhaps 5

                self.assertEqual(read(pad=False), rest)
                self.assertEqual(read(), rest + repeated)
                self.assertEqual(read(drop_last=True), rest[:divisible])

    def test_a_second_pass_without_set_epoch_warns_with_the_remedy(self):
        sampler = ddp.DistributedSampler(range(5), 2, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for epoch in range(3):
                sampler.set_epoch(epoch)
                list(sampler)  # no warning

        with self.assertWarnsRegex(UserWarning, r"call set_epoch\(epoch\)"):
            list(sampler)

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

    def test_its_memory_does_not_grow_without_shuffling(self):
        indices = iter(ddp.DistributedSampler(range(2**50), 8, 5, shuffle=False))

        self.assertEqual(next(indices), 5)

    def test_a_rank_out_of_range_is_an_error_that_says_so(self):
        for rank in (-1, 2):
            with self.assertRaisesRegex(ValueError, f"rank {rank} is not one of 2"):
                ddp.DistributedSampler(range(5), 2, rank)

    def test_a_start_out_of_range_is_an_error_that_says_so(self):
        for start in (-1, 6):
            with self.assertRaisesRegex(ValueError, rf"start is {start}, but must be in \[0, 5\]"):
                ddp.DistributedSampler(range(5), 2, 0).set_epoch(0, start)


class TheCases(unittest.TestCase):
    # What two real NCCL ranks printed with torch's sampler.
    GOLDEN = """\
case 1
epoch 0  rank 0  [0, 1, 2, 3] [4, 5, 6, 7]
epoch 0  rank 1  [0, 1, 2, 3] [4, 5, 6, 7]
epoch 1  rank 0  [0, 1, 2, 3] [4, 5, 6, 7]
epoch 1  rank 1  [0, 1, 2, 3] [4, 5, 6, 7]
case 2
epoch 0  rank 0  [4, 7, 2, 1]
epoch 0  rank 1  [0, 3, 5, 6]
epoch 1  rank 0  [4, 7, 2, 1]
epoch 1  rank 1  [0, 3, 5, 6]
case 3
epoch 0  rank 0  [4, 7, 2, 1]
epoch 0  rank 1  [0, 3, 5, 6]
epoch 1  rank 0  [5, 2, 7, 1]
epoch 1  rank 1  [4, 6, 3, 0]
case 4
epoch 0  rank 0  [2, 3, 1]
epoch 0  rank 1  [5, 0, 4]
epoch 1  rank 0  [2, 3, 1]
epoch 1  rank 1  [5, 0, 4]
case 4, dropping the short batch
epoch 0  rank 0
epoch 0  rank 1
epoch 1  rank 0
epoch 1  rank 1
case 5
epoch 0  rank 0  [4, 1, 2]
epoch 0  rank 1  [0, 3, 4]
epoch 1  rank 0  [4, 1, 2]
epoch 1  rank 1  [0, 3, 4]
case 5, with set_epoch
epoch 0  rank 0  [4, 1, 2]
epoch 0  rank 1  [0, 3, 4]
epoch 1  rank 0  [0, 2, 1]
epoch 1  rank 1  [4, 3, 0]
case 6
epoch 0  rank 0  [4, 7, 3, 0] [6]
epoch 0  rank 1  [1, 5, 9, 8] [2]
epoch 1  rank 0  [4, 7, 3, 0] [6]
epoch 1  rank 1  [1, 5, 9, 8] [2]
case 7
epoch 0  rank 0  [4, 7, 3, 0]
epoch 0  rank 1  [1, 5, 9, 8]
epoch 1  rank 0  [4, 7, 3, 0]
epoch 1  rank 1  [1, 5, 9, 8]
"""

    def test_the_nine_cases_show_the_golden_batches(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ddp.main(["cases"])

        shown = re.findall(r"case .*?(?=:)|epoch \d.*\S", out.getvalue())
        self.assertEqual(shown, self.GOLDEN.splitlines())


# ---- The task
def seeds_of_task(options):
    """Return the seeds of the training and of the validation data."""
    train_set, val_set, *_ = ddp.make_task(ddp.make_parser().parse_args(options.split()))
    return train_set.seed, val_set.seed


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


def wrapped_net():
    """Return the plain net in DistributedDataParallel, and an optimizer of it."""
    model = DistributedDataParallel(plain_net())
    return model, torch.optim.SGD(model.parameters(), lr=1)


def step_on_a_share(x, y, micro_batch_size):
    """Make a step with SGD on this rank's share of a batch: return (parameters, the job's sums)."""
    share = slice(dist.get_rank(), None, dist.get_world_size())
    model, optimizer = wrapped_net()
    sums = ddp.train_step(model, optimizer, x[share], y[share], micro_batch_size)
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


def masked_loss(logits, y):
    """A loss that makes ignored labels zero by a mask."""
    return (logits.sum(1) * (y != -100)).sum(), torch.zeros(())


def with_loss(batch_sums, function, *args):
    """Call function(*args) with another loss."""
    with mock.patch.object(ddp, "batch_sums", batch_sums):
        return function(*args)


def events_of_a_step(micro_batch_size):
    """Return the names of all that PyTorch's profiler sees in a step on 12 samples."""
    x, y = uneven_batch()
    model, optimizer = wrapped_net()
    with profile() as profiler:
        ddp.train_step(model, optimizer, x, y, micro_batch_size)
    return [event.name for event in profiler.function_events]


class TheStep(unittest.TestCase):
    """Every rank ends a step with the parameters of one process that had the whole batch."""

    def test_on_any_number_of_ranks_each_makes_the_step_of_one_process_on_the_whole_batch(self):
        x, y = uneven_batch()
        expected = step_of_one_process(x, y)

        for ranks, micro_batch_size in ((1, 5), (2, 4), (3, 4), (3, 1), (4, 2)):
            with self.subTest(ranks=ranks, micro_batch_size=micro_batch_size):
                for step in on_ranks(ranks, step_on_a_share, x, y, micro_batch_size):
                    assert_close(step, expected)

    def test_without_any_label_it_changes_nothing(self):
        x, y = uneven_batch()
        y[:] = -100
        unchanged = list(plain_net().parameters()), torch.zeros(3, dtype=torch.float64)

        for step in on_ranks(2, with_loss, masked_loss, step_on_a_share, x, y, 3):
            assert_close(step, unchanged)

    def test_ranks_all_reduce_labels_and_gradients_once_in_a_step(self):
        for micro_batch_size in (12, 5, 1):
            for events in on_ranks(2, events_of_a_step, micro_batch_size):
                self.assertEqual(events.count("c10d::allreduce_"), 2)  # labels, gradients

    def test_it_calls_no_item_and_no_mask_which_would_wait_for_the_device(self):
        [events] = on_ranks(1, events_of_a_step, 5)

        self.assertIn("aten::convolution_backward", events)
        self.assertEqual({"aten::item", "aten::nonzero", "aten::index"} & set(events), set())


# ---- Evaluation
def net_of_rank():
    """Return a net whose BatchNorm has other statistics on each rank."""
    net = nn.Sequential(plain_net(), nn.BatchNorm1d(3))
    if dist.is_initialized():
        net[1].running_mean[0] += dist.get_rank()
    return net


def evaluation(num_samples):
    """Return the loss and the accuracy that evaluate() gives on this rank."""
    data = ddp.SyntheticDataset(num_samples, 40)
    sampler = ddp.DistributedSampler(data, shuffle=False, pad=False)
    return ddp.evaluate(net_of_rank(), DataLoader(data, 4, sampler=sampler), CPU)


class TheEvaluation(unittest.TestCase):
    """It reads each sample once, on however many ranks."""

    def test_on_1_to_4_ranks_it_gives_the_numbers_of_one_batch_in_one_process(self):
        expected = loss_and_accuracy(net_of_rank().eval(), ddp.SyntheticDataset(25, 40))

        for world_size in (1, 2, 3, 4):
            for numbers in on_ranks(world_size, evaluation, 25):
                assert_close(numbers, expected)

    def test_a_rank_without_a_sample_takes_part(self):
        task = functools.partial(task_of, 0, 1)

        self.assertIn("epoch 0 | loss", job_on_ranks(2, "--epochs 1", task).out)

    def test_without_any_sample_it_gives_nan(self):
        self.assertTrue(np.isnan(on_ranks(1, evaluation, 0)).all())

    def test_it_makes_no_graph_and_no_inference_tensors(self):
        out = job_on_ranks(1, SMALL, telling_task).out

        self.assertIn("False torch.float32 False False\n", out)

    def test_the_digest_covers_parameters_and_buffers(self):
        module = net_of_rank()
        digests = {ddp.digest(module)}

        for tensor in module.state_dict().values():
            tensor += 1
            digests.add(ddp.digest(module))

        self.assertEqual(len(digests), 1 + 4 + 5)  # of the convolutions, of BatchNorm


# ---- The number of GPUs changes the time, not the training
def uneven_task(args):
    """A net without BatchNorm, and samples with unequally many labels."""
    return with_sgd(args, uneven_data(args.num_samples), ddp.SyntheticDataset(25, 40), plain_net())


class TheNumberOfRanks(Test):
    """For nets that treat each sample by itself: BatchNorm and dropout depend on a rank's share."""

    def test_the_training_is_the_same_on_1_2_3_4_and_6_ranks_with_any_micro_batch(self):
        # The last step of an epoch has 1 or 4 samples, in place of 12; or 11, and is dropped.
        for more in ("--num-samples 37", "--num-samples 100", "--num-samples 47 --drop-last"):
            options = f"--global-batch-size 12 --epochs 2 --lr 0.5 {more} --micro-batch-size "
            expected = job_on_ranks(1, options + "12", uneven_task)

            for world_size, micro_batch_size in ((1, 5), (2, 4), (3, 4), (4, 2), (6, 2)):
                with self.subTest(more, world_size=world_size):
                    trained = job_on_ranks(world_size, f"{options}{micro_batch_size}", uneven_task)

                    self.assertEqual(
                        lines_without_speed(trained.out)[:-1],
                        lines_without_speed(expected.out)[:-1],
                    )
                    assert_close(trained.state_dict, expected.state_dict)

    def test_it_is_the_same_when_stopped_on_4_ranks_resumed_on_3_then_2_then_6(self):
        options = "--num-samples 100 --global-batch-size 12 --epochs 4 --lr 0.5"
        expected = job_on_ranks(1, options, uneven_task)
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/elastic.pt"

        out = ""
        for world_size, stop_at in ((4, 5), (3, 8), (2, 10), (6, None)):
            trained = job_on_ranks(world_size, options, uneven_task, stop_at)
            out += trained.out

        self.assertIn("epoch 2, 24 samples read", out)  # 4 + 7 + 9 steps, of 9 in an epoch
        self.assertEqual(lines_without_speed(out)[:-1], lines_without_speed(expected.out)[:-1])
        assert_close(trained.state_dict, expected.state_dict)

    def test_going_on_with_another_global_batch_size_is_said(self):
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {self.folder}/batch.pt"
        job_on_ranks(2, f"{options} --global-batch-size 8", stop_at=3)

        out = job_on_ranks(2, f"{options} --global-batch-size 4").out

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


class Augmented(ddp.SyntheticDataset):
    """One signal again and again, each time shifted by what PyTorch's generator draws."""

    def __getitem__(self, index):
        x, y = super().__getitem__(0)
        return x + torch.rand(()), y


def random_task(args):
    """A task that draws random numbers, for each sample and in each step."""
    net = Regularised(nn.Conv1d(3, 3, 3, padding=1), nn.Conv1d(3, 3, 1))
    return with_sgd(args, Augmented(44, 8), ddp.SyntheticDataset(4, 8), net)


class AfterAStop(Test):
    """Jobs that end before one of their steps, each of which is saved, and go on."""

    def assert_same_bits(self, world_size, stops, options="", task=ddp.make_task, at_first=""):
        """Compare a job with one that is stopped in between, and has more options at first."""
        options = f"{SMALL} --global-batch-size {2 * world_size} {options}"
        expected = job_on_ranks(world_size, options, task).out
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/{self.id()}-{world_size}"

        out = ""
        for stop_at in stops:
            out += job_on_ranks(world_size, f"{options} {at_first}", task, stop_at).out
        out += job_on_ranks(world_size, options, task).out

        self.assertEqual(out.count("resuming from"), len(stops))
        self.assertEqual(lines_without_speed(out), lines_without_speed(expected))  # the digest, too

    def test_a_job_on_2_3_and_5_ranks_ends_as_the_uninterrupted_one(self):
        for world_size in (2, 3, 5):
            with self.subTest(world_size=world_size):
                self.assert_same_bits(world_size, stops=(3, 7), options="--micro-batch-size 1")

    def test_a_job_with_loader_workers_goes_on_without_them_and_ends_as_the_uninterrupted_one(self):
        self.assert_same_bits(3, stops=(3,), options="--epochs 1", at_first="--num-workers 1")

    def test_a_job_with_dropout_and_augmentation_ends_as_the_uninterrupted_one(self):
        self.assert_same_bits(3, stops=(3, 5), task=random_task)

    def test_a_finished_job_is_not_trained_again(self):
        options = f"{SMALL} --checkpoint {self.folder}/finished.pt"
        first = job_on_ranks(2, options)

        again = job_on_ranks(2, options)

        self.assertEqual(lines_without_speed(again.out), lines_without_speed(first.out)[-1:])


# ---- The checkpoint
def infinite_loss(logits, y):
    """A loss that is infinite, while its gradients are zero."""
    return 0 * logits.sum() + float("inf"), torch.zeros(())


def loss_without_finite_gradient(logits, y):
    """A loss of zero, whose gradients are not numbers."""
    return (0 * logits.sum()).sqrt(), torch.zeros(())


def job_with_a_path_of_its_own(options):
    """Run a job whose --checkpoint is another file for each rank."""
    return job(f"{options}-{dist.get_rank()}")


class TheCheckpoint(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.options = f"{SMALL} --checkpoint-every 1 --checkpoint"
        cls.path = cls.folder / "first"
        job_on_ranks(2, f"{cls.options} {cls.path}", stop_at=3)
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
        path = self.folder / "seen"
        shutil.copy(self.path, f"{path}-0")

        first, second = on_ranks(2, job_with_a_path_of_its_own, f"{self.options} {path}")

        self.assertIn("16 samples read", first.out)
        torch.testing.assert_close(first.state_dict, second.state_dict, rtol=0, atol=0)
        self.assertFalse(os.path.exists(f"{path}-1"))

    def test_a_file_that_is_no_checkpoint_is_refused_and_left_as_it_is(self):
        whole, path = self.path.read_bytes(), self.folder / "bad"
        for content in (b"", b"no checkpoint", whole[:5000], whole[:-1]):
            path.write_bytes(content)

            self.assertRegex(self.refusal(path), "^InputError: .*/bad is damaged or not a")
            self.assertEqual(path.read_bytes(), content)

    def test_one_of_another_job_is_refused_with_the_difference(self):
        for option, known in (
            ("--num-samples 99", "the number of samples was 44"),
            ("--length 99", "--length was 64"),
            ("--seed 99", "--seed was 0"),
        ):
            self.assertIn(f"{known}, but is 99 here", self.refusal(self.path, option))

    def test_one_that_has_another_net_or_optimizer_is_refused_with_the_difference(self):
        for name, value, here in (
            ("6.weight", [5, 32, 3], [3, 32, 3]),
            ("the optimizer", ["SGD", 12], ["Adam", 12]),
            ("the dataset", "list", "SyntheticDataset"),
            ("the name of no parameter", 1, None),
        ):
            message = self.refusal_of_changed(job=self.saved["job"] | {name: value})
            self.assertIn(f"{name} was {value}, but is {here} here", message)

    def test_one_that_lacks_a_name_of_this_job_is_refused(self):
        saved = dict(self.saved["job"])
        del saved["6.bias"]

        self.assertIn("6.bias was None, but is [3] here", self.refusal_of_changed(job=saved))

    def test_one_that_would_execute_something_does_not(self):
        folder = self.folder / "executed"

        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(folder),)

        self.assertIn("UnpicklingError", self.refusal_of_changed(evil=Evil()))
        self.assertFalse(folder.exists())

    def test_the_learning_rate_is_the_command_lines(self):
        path = shutil.copy(self.path, self.folder / "lr")

        trained = job_on_ranks(2, f"{self.options} {path} --lr 0")

        before, after = self.saved["module"], trained.state_dict
        self.assertEqual(len(trained.labels), 10)  # 12 of two epochs, without the 2 before
        self.assertTrue(torch.equal(before["0.weight"], after["0.weight"]))

    def test_a_loss_or_a_net_that_is_not_finite_ends_the_job_and_is_not_saved(self):
        path = self.folder / "finite"
        for loss in (infinite_loss, loss_without_finite_gradient):
            for options in (f"{self.options} {path}", f"{SMALL} --checkpoint {path}"):
                for error in on_ranks(2, with_loss, loss, error_of_job, options):
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
            optimizer.zero_grad()
            F.cross_entropy(
                module(x), y
            ).backward()  # of 256 labels: no bit differs from a sum / 256
            optimizer.step()
    return ddp.digest(module)


def job_with_a_clock(options):
    """Return what a rank prints on a terminal where each look at the clock is a second later."""
    seconds = itertools.count()
    with mock.patch.object(ddp.time, "perf_counter", lambda: next(seconds)):
        return job(options, terminal=True).out


LOAD_2600_TENSORS_WITH_1024_FILES = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
def make_task(args):
    data = [(torch.randn(3, 8), torch.randint(3, (8,))) for _ in range(1300)]
    net = torch.nn.Conv1d(3, 3, 1)
    return data, data[:1], net, torch.optim.SGD(net.parameters())
ddp.make_task = make_task
"""


class TheJob(Test):
    def test_one_rank_trains_what_a_plain_loop_does(self):
        expected = digest_of_a_plain_loop()

        for parallel in ("ddp", "dp"):
            options = f"--seed 7 --lr 0.02 --global-batch-size 4 --parallel {parallel}"
            self.assertIn(expected, job_on_ranks(1, f"{SMALL} {options}").out)

    def test_each_option_changes_what_is_trained(self):
        options = (
            "--epochs 1|--global-batch-size 9|--micro-batch-size 1|--lr 0.1|--drop-last|"
            "--amp|--seed 1|--num-samples 40|--length 65|"
        )

        digests = {
            lines_without_speed(job_on_ranks(3, f"{SMALL} {option}").out)[-1]
            for option in options.split("|")
        }

        self.assertEqual(len(digests), 10)  # with that of no option, the last

    def test_loss_and_accuracy_are_those_of_all_ranks(self):
        train_set, val_set, net, _ = sgd_task(types.SimpleNamespace(lr=0))
        numbers = loss_and_accuracy(net, train_set) + loss_and_accuracy(net, val_set)

        out = job_on_ranks(3, f"{SMALL} --lr 0", sgd_task).out

        line = "| loss {:.4f} accuracy {:.3f} | val_loss {:.4f} val_accuracy {:.3f} |"
        self.assertEqual(out.count(line.format(*numbers)), 2)

    def test_amp_runs_training_and_evaluation_in_bfloat16(self):
        out = job_on_ranks(1, f"{SMALL} --amp", telling_task).out

        self.assertNotIn("True torch.float32", out)
        self.assertIn("False torch.bfloat16", out)

    def test_on_a_terminal_a_progress_line_redraws_itself(self):
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {self.folder}/clock"
        job_on_ranks(3, options, stop_at=3)

        out, *others = on_ranks(3, job_with_a_clock, options)

        self.assertIn("epoch 0 | 36/44 samples | 12.0 samples/s  \r", out)  # 12 of them now, in 1 s
        self.assertIn("epoch 1 | 44/44 samples | 11.0 samples/s  \r", out)  # in 4 s
        self.assertIn(" | 6.7 samples/s\n", out)  # epoch 0: 20 samples in 3 s
        self.assertIn(" | 8.8 samples/s\n", out)  # epoch 1: 44 samples in 5 s
        self.assertEqual(others, ["", ""])

    def test_random_numbers_differ_between_ranks_and_steps(self):
        sums = set()
        for rank in on_ranks(3, job, SMALL, random_task):
            sums.update(rank.x_sums)

        self.assertEqual(len(sums), 3 * 2 * 4)  # ranks, epochs, steps

    def test_random_numbers_of_loader_workers_differ_between_ranks(self):
        first, second = on_ranks(2, job, "--epochs 1 --num-workers 1", random_task, 4)

        self.assertNotEqual(first.x_sums, second.x_sums)

    def test_loader_workers_take_2600_tensors_where_1024_files_may_be_open(self):
        script = self.script(LOAD_2600_TENSORS_WITH_1024_FILES)
        options = "--epochs 1 --num-workers 1 --global-batch-size 130"

        [trained] = on_ranks(1, job_of_script, script, options)

        self.assertEqual(len(trained.labels), 10)

    def test_data_that_cannot_be_trained_on_is_refused_by_all_ranks(self):
        for label, num_val_samples, options, message in (
            (0, 0, "", "the validation data has no sample"),
            (0.5, 1, "", "labels must be integers"),
            (-100, 1, "", "nothing to train on"),
            (0, 1, "--global-batch-size 10 --drop-last", "nothing to train on"),
        ):
            task = functools.partial(task_of, label, num_val_samples)
            for error in on_ranks(2, error_of_job, options, task):
                self.assertRegex(error, f"^InputError: {message}")


# ---- Launching, failing, ending. What script() makes of each of these is a program that can be run
# by hand, beside ddp_reference.py.
RAISE_ON_RANK_1 = """
def train(args, device):
    if dist.get_rank() == 1:
        raise ValueError("by a test")
    dist.barrier()
ddp.train = train
"""

RAISE_ON_EVERY_RANK = """
os_exit = os._exit
def exit_after_both_have_printed(status):
    dist.barrier()
    os_exit(status)
os._exit = exit_after_both_have_printed
def train(args, device):
    raise ValueError(f"of rank {dist.get_rank()}")
ddp.train = train
"""

KILL_RANK_1_AT_ITS_THIRD_STEP = """
train_step, steps = ddp.train_step, []
def killed_step(*args):
    steps.append(1)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1"
    if len(steps) == 3 and dist.get_rank() == 1 and not restarted:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(*args)
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
def train(args, device):
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

WAIT_FOR_THE_END_OF_THE_LAUNCHER = """
if __name__ != "__main__":
    launcher = os.getppid()
    print("the rank is being imported", flush=True)
    while os.getppid() == launcher:
        pass
"""


class TheLaunch(Test):
    VERSION = re.escape(torch.__version__)
    REPORT = rf"""^ddp on gloo, world size 2, cpu, global batch size 8, torch {VERSION}
(epoch \d \| loss \d\.\d+ accuracy \d\.\d+ \| val_loss \d\.\d+ val_accuracy \d\.\d+ \| \S+ samples/s
){{6}}parameters sha256 [0-9a-f]{{64}}
$"""

    def test_the_main_job_reports_in_the_agreed_form_that_it_learns(self):
        folder = self.folder / "with # and space"
        folder.mkdir()

        out, err = run(SCRIPT, "--length", 300, TMPDIR=str(folder))

        self.assertRegex(out, self.REPORT)
        self.assert_learned(out)
        self.assertEqual((err, list(folder.glob("tmp*"))), ("", []))

    def test_a_rank_that_raises_ends_the_job_with_its_traceback_first(self):
        _, err = run(self.script(RAISE_ON_RANK_1), status=1)

        pattern = r"(?s)^rank 1 failed:\nTraceback.*?\nValueError: by a test\n(?!.*SIGTERM)"
        self.assertRegex(err, pattern)  # mp.spawn does not log that it ends the other

    def test_each_rank_that_raises_prints_its_own_traceback(self):
        _, err = run(self.script(RAISE_ON_EVERY_RANK), status=1)

        self.assertIn("\nValueError: of rank 0\n", err)
        self.assertIn("\nValueError: of rank 1\n", err)

    def test_a_rank_that_is_killed_is_named_and_its_loader_workers_end(self):
        script = self.script(KILL_A_RANK_WHILE_ITS_LOADER_WORKER_IS_IMPORTED)

        _, err = run(script, "--nproc-per-node", 1, "--num-workers", 1, status=1)

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

        finish(launcher, status=-signal.SIGKILL)  # It waits for the rank, too.


class InTheRanks(Test):
    """A job of two ranks that tell about themselves and then refuse their input."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.out, cls.err = run(cls.script(TELL_ABOUT_A_RANK_AND_REFUSE), status=2)

    def test_they_share_the_cores(self):
        self.assertEqual(self.out.count("3 threads"), 2)  # each half of 6

    def test_on_one_machine_they_listen_on_the_loopback_address_alone(self):
        self.assertEqual(self.out.count("listening on {'127.0.0.1'}"), 2)

    def test_no_default_argument_of_pytorch_holds_their_group(self):
        self.assertEqual(self.out.count("default group None"), 2)  # pytorch/pytorch#190489

    def test_what_they_refuse_is_one_line_and_the_status_is_2(self):
        self.assertEqual(self.err, "my_job.py: error: by a test\n")


class UnderTorchrun(Test):
    RESTARTING = [*ONE_MACHINE, "--max-restarts=1"]

    def test_a_killed_job_is_restarted_and_ends_as_the_uninterrupted_one(self):
        script = self.script(KILL_RANK_1_AT_ITS_THIRD_STEP)
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {self.folder}/killed".split()
        restarting = [*self.RESTARTING, "--nproc-per-node=2", script, *options]

        out, _ = run(*restarting, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

        self.assertIn("resuming from", out)
        self.assertIn(lines_without_speed(job_on_ranks(2, SMALL).out)[-1], out)

    def test_a_restart_that_would_hang_says_what_to_do(self):
        restarting = *self.RESTARTING, self.script(RAISE_ON_EVERY_RANK)

        _, err = run(*restarting, status=1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")

        self.assertIn("run torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", err)

    def test_its_report_holds_the_traceback_of_the_cause(self):
        script = self.script(RAISE_ON_RANK_1)

        _, err = run(*ONE_MACHINE, "--nproc-per-node=2", script, status=1)

        self.assertRegex(err, "(?s)Root Cause.*ValueError: by a test")

    def test_two_agents_train_what_one_launch_does(self):
        store = f"--rdzv-conf=store_type=file --rdzv-endpoint={self.folder}/store"
        options = f"{store} --rdzv-backend=c10d --nnodes=2 --nproc-per-node=1".split()
        agent = *TORCHRUN, *options, SCRIPT, *SMALL.split()

        agents = [start(*agent, GLOO_SOCKET_IFNAME=LOOPBACK) for _ in range(2)]

        out = "".join(finish(agent)[0] for agent in agents)
        self.assertIn(lines_without_speed(job_on_ranks(2, SMALL).out)[-1], out)


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
            (f"{long_key}.cls", b"8"),
            (f"{long_key}.jpg", b"\xff"),
        ]
        path.write_bytes(tar(*members))

        first, second = ddp.read_shard(path)

        self.assertEqual(first.pop("x.npy").tolist(), [0, 1, 2])
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

    def test_ranks_and_workers_read_equally_much_from_different_streams(self):
        ranks = self.read(3, 2, samples_per_epoch=44)

        self.assertEqual([len(read) for read in ranks], [15, 15, 15])
        workers = {
            str(read[worker:14:2]) for read in ranks for worker in (0, 1)
        }  # They take turns.
        self.assertEqual(len(workers), 6)

    def test_what_is_drawn_depends_on_seed_epoch_and_start(self):
        def draw(**changes):
            return numbers(self.stream(44, 2, 1, **changes))[:20]

        first = draw()

        self.assertEqual(draw(), first)
        for other in (draw(seed=1), draw(epoch=1), draw(start=4)):
            self.assertNotEqual(other, first)

    def test_the_seed_of_the_command_line_reaches_the_shards(self):
        options = "--seed 3 --shards a --val-shards a --samples-per-epoch 4"

        self.assertEqual(on_ranks(1, seeds_of_task, options), [(3, 0)])

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
        options = f"--epochs 2 --checkpoint-every 1 --checkpoint {self.folder}/ck --shards {shards}"
        job_on_ranks(3, options, stop_at=3)

        ranks = on_ranks(3, job, options)

        samples = np.sum([rank.labels for rank in ranks], axis=0) / 4
        self.assertEqual(samples.tolist(), [12, 4, 12, 12, 12, 4])  # after the first 24 of 40

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


# ---- The README: what it shows is run
class TheReadme(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.readme = (HERE / "README.md").read_text()
        cls.diff, cls.my_job, cls.regression, cls.shards = re.findall(
            r"(?s)```(?:diff|python)\n(.*?)```", cls.readme
        )

    def test_the_two_sides_of_its_diff_train_the_same(self):
        path = self.folder / "model.pt"
        diff = self.diff.replace("model.pt", str(path))
        plain = re.sub(r"(?m)^( |-|\+.*\n)", "", diff)  # without the lines with a +
        data_parallel = re.sub(r"(?m)^( |\+|-.*\n)", "", diff)  # without those with a -

        runpy.run_path(self.write(plain))
        expected = torch.load(path)
        path.unlink()
        torchrun = *ONE_MACHINE, "--nproc-per-node=2", self.write(data_parallel)
        run(*torchrun, GLOO_SOCKET_IFNAME=LOOPBACK)

        assert_close(torch.load(path), expected)

    def test_its_script_resumed_on_3_ranks_ends_as_the_uninterrupted_job(self):
        script = self.write(self.my_job)
        options = "--global-batch-size 300 --epochs 1"
        expected, *_ = on_ranks(3, job_of_script, script, options)
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/mine.pt"
        on_ranks(3, job_of_script, script, options, 3)

        out, _ = run(script, *options.split(), "--nproc-per-node", 3)

        self.assertIn("epoch 0, 600 samples read", out)
        self.assertEqual(lines_without_speed(out), lines_without_speed(expected.out))

    def test_its_regression_trains_the_same_on_1_and_3_ranks(self):
        # In place of a class, int(image... > image...), the image's label is one of its numbers.
        script = re.sub(r"int\(image.*\)\)", "image[0, :1, 0])", self.my_job)
        path = self.write(script.replace("288, 2", "288, 1") + self.regression)
        options = "--global-batch-size 60 --epochs 2"

        [expected] = on_ranks(1, job_of_script, path, options)
        trained, *_ = on_ranks(3, job_of_script, path, options)

        self.assertRegex(trained.out, r"accuracy 0\.[1-9]")  # the error
        self.assertEqual(
            lines_without_speed(trained.out)[:2], lines_without_speed(expected.out)[:2]
        )

    def test_its_shards_can_be_trained_on(self):
        shards = f"{self.folder}/train-*.tar"
        runpy.run_path(self.write(self.shards.replace("train-", f"{self.folder}/train-")))
        options = f"--epochs 1 --shards {shards} --val-shards {shards} --samples-per-epoch 100"

        self.assertIn("epoch 0 | loss", job_on_ranks(2, options).out)

    def test_the_tests_that_its_checklist_names_exist(self):
        names = re.findall(r"(?m)^\|.*\| `(\w+)` \|[^|]*\|$", self.readme)
        tests = pathlib.Path(__file__).read_text()

        self.assertGreater(len(names), 20)
        for name in names:
            self.assertRegex(tests, rf"def test_\w*{name}")


# ---- The command line
class TheCommandLine(Test):
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
            "--length=0 --length=100000000000000 --lr=-1 --lr=nan --lr=inf --nproc-per-node=0 "
            "--num-workers=-1 --seed=-1 --checkpoint-every=0 --samples-per-epoch=0"
        )
        for option in options.split():
            with self.subTest(option):
                name, value = option.split("=")
                message = rf"argument {name}: invalid \w+ from \d to .* value: '{value}'"
                self.assertRegex(self.refusal(option), message)

    def test_options_that_cannot_work_are_refused(self):
        for options, message in {
            "--wat": "unrecognized arguments: --wat",
            "--global-batch-size 12 --nproc-per-node 5": "12 is no multiple of 5, the number",
            "--checkpoint-every 1": "needs --checkpoint",
            "--checkpoint=": "no file can be written there",
            "--checkpoint no/a.pt": "no file can be written there",
            "--shards x": "go together",
            "--samples-per-epoch 4": "go together",
            "--shards a --val-shards a --samples-per-epoch 4": "there is no shard a",
            "--parallel dp --amp": "one process",
            "--parallel dp --sync-bn": "one process",
            "--parallel dp --nproc-per-node 2": "one process",
            "--sync-bn": "--sync-bn needs GPUs",
            "--backend nccl": "--backend gloo",
        }.items():
            with self.subTest(options):
                self.assertIn(message, self.refusal(options))

    def test_under_torchrun_the_number_of_processes_is_torchruns(self):
        with mock.patch.dict(
            os.environ, TORCHELASTIC_RUN_ID="1", LOCAL_WORLD_SIZE="2", WORLD_SIZE="3"
        ):
            self.assertIn("torchrun's own", self.refusal("--nproc-per-node 2"))
            self.assertIn("no multiple of 3", self.refusal("--global-batch-size 8"))
            self.assertIn("dp is one process", self.refusal("--parallel dp"))


# ---- On GPUs, if there are any
TRAIN_WITH_ADAGRAD = """
make_task = ddp.make_task
def make_task_with_adagrad(args):
    *task, _ = make_task(args)
    return *task, torch.optim.Adagrad(task[2].parameters())
ddp.make_task = make_task_with_adagrad
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

    def test_sync_bn_makes_the_training_the_same_on_1_2_and_3_processes(self):
        options = f"{SMALL} --num-samples 48 --sync-bn --backend gloo --global-batch-size 12"

        losses = []
        for nproc_per_node in (1, 2, 3):
            out = self.run_job(f"{options} --nproc-per-node {nproc_per_node}")
            losses.append(float(re.search(r"\| loss (\S+)", out)[1]))

        self.assertLess(max(losses) - min(losses), 0.001)

    def test_gloo_processes_share_a_gpu(self):
        out = self.run_job(f"{SMALL} --nproc-per-node {GPUS + 1}")

        self.assertIn(f"ddp on gloo, world size {GPUS + 1}, cuda, ", out)

    def test_an_optimizer_that_made_its_state_on_the_cpu_trains(self):
        out = self.run_job(SMALL, self.script(TRAIN_WITH_ADAGRAD))

        self.assertIn("epoch 1 | loss", out)

    def test_a_resumed_job_goes_on(self):
        options = f"{SMALL} --checkpoint {self.folder}/ck"
        self.run_job(f"{options} --epochs 1")

        self.assertIn("epoch 1, 0 samples read", self.run_job(options))

    def test_a_process_of_torchrun_that_sees_one_gpu_of_its_own_uses_nccl(self):
        script = self.script("ddp.worker = lambda rank, local_rank, args: print(args.backend)")

        out, _ = run(
            script,
            TORCHELASTIC_RUN_ID="1",
            RANK="0",
            LOCAL_RANK="3",
            WORLD_SIZE="16",
            LOCAL_WORLD_SIZE="8",
            CUDA_VISIBLE_DEVICES=self.VISIBLE.split(",")[0],
        )

        self.assertEqual(out, "nccl\n")


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`."""
    result = unittest.main(exit=False, verbosity=2).result
    bad = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    failed, skipped = len(bad), len(result.skipped)
    passed = result.testsRun - failed - skipped
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0 or not result.testsRun)  # -k NAME may be mistyped


if __name__ == "__main__":
    main()
