"""The guarantees of ddp_reference.py. The names of the tests are the list of them.

    bash run.sh test                             # all; also: python -m pytest test_ddp_reference.py
    python test_ddp_reference.py -k sampler      # those with "sampler" in their name

The oracles: torch's own sampler, one process on the whole batch, a job that was not interrupted.
"""

import concurrent.futures
import contextlib
import datetime
import functools
import io
import itertools
import os
import pathlib
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import unittest
import warnings
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import ddp_reference as ddp

CPU = torch.device("cpu")
GPUS = torch.cuda.device_count()
HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE / "ddp_reference.py"
TORCHRUN = ["-m", "torch.distributed.run", "--local-addr=127.0.0.1"]
SMALL = "--num-samples 44 --length 64 --epochs 2"


# ---- Helpers
def setUpModule():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all is on the CPU but OnGPUs,
    torch.set_num_threads(1)  # and this process computes as the ranks do
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's `tests &` ignores it.


def end_with_parent():
    """End this process when the one that started it ends."""

    def wait():
        mp.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@functools.cache
def processes():
    """Six processes for on_ranks(), which import torch only once."""
    spawn = mp.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(6, spawn, initializer=end_with_parent)


def as_rank(rank, world_size, path, function, args):
    """Return function(*args), called in a gloo group."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    store, timeout = dist.FileStore(path, world_size), datetime.timedelta(seconds=300)
    group = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
    dist.init_process_group("gloo", **group)
    try:
        result = function(*args)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def on_ranks(world_size, function, *args):
    """Call function(*args) on each rank of a group of 1 to 6 processes, and return the results."""
    with tempfile.TemporaryDirectory() as folder:
        call = functools.partial(processes().submit, as_rank)
        ranks = [call(r, world_size, f"{folder}/store", function, args) for r in range(world_size)]
        return [rank.result() for rank in ranks]


def parse(options):
    """Return the arguments of a job in this process group."""
    args = ddp.make_parser().parse_args(options.split())
    args.nproc_per_node = dist.get_world_size()
    ddp.check_processes(args, refuse=None)
    ddp.check_batches(args, refuse=None)
    return args


def job(options, task=ddp.make_task, stop_at=None):
    """Run one rank of a job, up to but not including its step stop_at.

    Returns (what it prints, its parameters at the end).
    """
    parameters, steps, out = [], itertools.count(1), io.StringIO()
    train_step, digest = ddp.train_step, ddp.digest

    def stopping_step(*args):
        if next(steps) == stop_at:
            raise InterruptedError
        return train_step(*args)

    def noting_digest(module):
        parameters.extend(nn.utils.parameters_to_vector(module.parameters()).tolist())
        return digest(module)

    with (
        mock.patch.multiple(ddp, make_task=task, train_step=stopping_step, digest=noting_digest),
        contextlib.redirect_stdout(out),
        contextlib.suppress(InterruptedError),
    ):
        ddp.train(parse(options), CPU)
    speed = r"[\d.]+ samples/s"  # never the same
    return re.sub(speed, "", out.getvalue()), parameters


def jobs(world_size, options, task=ddp.make_task, stop_at=None):
    """Return what job() returns on rank 0 of so many ranks."""
    return on_ranks(world_size, job, options, task, stop_at)[0]


def error_of_job(options, task=ddp.make_task):
    """Return the error with which one rank of a job ends."""
    try:
        job(options, task)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def start(*command, cwd=None, **environ):
    """Start a Python program with its output in pipes, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process, status=0):
    """Return (stdout, stderr) of a program, once every process that holds them has ended."""
    try:
        out, err = process.communicate(timeout=100)
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


class Operators(TorchDispatchMode):
    """Notes the name of each operator that PyTorch calls, and the bytes of each tensor it makes."""

    def __init__(self):
        super().__init__()
        self.names, self.sizes = [], []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.names.append(operator.overloadpacket.__name__)
        if isinstance(result, torch.Tensor) and result._base is None:
            self.sizes.append(result.untyped_storage().nbytes())
        return result


class Test(unittest.TestCase):
    """A test case with a folder of its own."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)

    def script(self, fault):
        """Write a program that changes ddp_reference and calls its main, as users' scripts do."""
        path = self.folder / "my_job.py"
        path.write_text(f"""
import os, signal, sys
sys.path.insert(0, {str(HERE)!r})
import torch
import torch.distributed as dist
import ddp_reference as ddp
{fault}
if __name__ == "__main__":
    sys.exit(ddp.main(sys.argv[1:]))
""")
        return path


# ---- The sampler
def indices_of_ranks(n, num_replicas, epoch=0, start=0, **options):
    """Return what each rank reads of n samples."""
    read = []
    for rank in range(num_replicas):
        sampler = ddp.DistributedSampler(range(n), num_replicas, rank, **options)
        sampler.set_epoch(epoch, start)
        read.append(list(sampler))
        assert len(sampler) == len(read[-1])
    return read


def in_turns(ranks):
    """Return the indices of all ranks in the order in which the job reads them."""
    turns = itertools.zip_longest(*ranks)
    return [index for turn in turns for index in turn if index is not None]


class TheSampler(unittest.TestCase):
    def assert_same_as_torch(self, *arguments):
        ours, torchs = ddp.DistributedSampler(*arguments), TorchSampler(*arguments)
        self.assertEqual(list(ours), list(torchs))  # of epoch 0, before any set_epoch
        ours.set_epoch(5)
        torchs.set_epoch(5)

        self.assertEqual(list(ours), list(torchs))
        for name in vars(torchs):
            self.assertEqual(getattr(ours, name), getattr(torchs, name), name)

    def test_it_has_the_indices_and_attributes_of_torchs_sampler_in_every_small_case(self):
        shuffle_and_drop_last = itertools.product((True, False), repeat=2)
        for shuffle, drop_last in shuffle_and_drop_last:
            for n, num_replicas in itertools.product(range(20), range(1, 8)):
                for rank in range(num_replicas):
                    seed = n % 3
                    case = range(n), num_replicas, rank, shuffle, seed, drop_last
                    self.assert_same_as_torch(*case)

    def test_it_has_the_indices_of_torchs_sampler_around_the_size_of_its_chunks(self):
        for n in (8191, 8192, 8193, 100_003):
            self.assert_same_as_torch(range(n), 1, 0)
            self.assert_same_as_torch(range(n), 7, 6)

    def test_pytorchs_int32_and_int64_permutations_are_the_same(self):
        def permutation(n, dtype):
            return torch.randperm(n, generator=torch.Generator().manual_seed(1), dtype=dtype)

        for n in (10, 100_003, 3_000_000):
            int32, int64 = permutation(n, torch.int32), permutation(n, torch.int64)
            self.assertTrue(torch.equal(int32, int64))

    def test_after_any_start_any_number_of_ranks_reads_the_rest_in_the_same_order(self):
        for n, num_replicas, shuffle in itertools.product((1, 7, 24), range(1, 7), (True, False)):
            order = in_turns(indices_of_ranks(n, 1, 3, shuffle=shuffle))
            for start in range(n + 1):
                ranks = functools.partial(
                    indices_of_ranks, n, num_replicas, 3, start, shuffle=shuffle
                )
                rest = order[start:]
                surplus = len(rest) % num_replicas
                repeated = (order * 7)[: -len(rest) % num_replicas]

                self.assertEqual(in_turns(ranks(pad=False)), rest)
                self.assertEqual(in_turns(ranks()), rest + repeated)
                self.assertEqual(in_turns(ranks(drop_last=True)), rest[: len(rest) - surplus])

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
        indices = iter(ddp.DistributedSampler(range(100_000), 8, 3))

        with Operators() as operators:
            first = next(indices)

        kept = [
            v.untyped_storage() for v in indices.gi_frame.f_locals.values() if torch.is_tensor(v)
        ]
        self.assertIs(type(first), int)
        self.assertEqual(max(operators.sizes), 400_000)
        self.assertEqual({storage.nbytes() for storage in kept}, {50_000})

    def test_its_memory_does_not_grow_without_shuffling(self):
        indices = iter(ddp.DistributedSampler(range(2**50), 2**20, 5, shuffle=False))

        self.assertEqual([next(indices), next(indices)], [5, 5 + 2**20])

    def test_a_rank_or_a_start_out_of_range_is_an_error_that_says_so(self):
        for rank in (-1, 2):
            with self.assertRaisesRegex(ValueError, f"rank {rank} is not one of 2"):
                ddp.DistributedSampler(range(5), 2, rank)
        for start in (-1, 6):
            with self.assertRaisesRegex(ValueError, rf"start is {start}, but must be in \[0, 5\]"):
                ddp.DistributedSampler(range(5), 2, 0).set_epoch(0, start)


class TheCases(unittest.TestCase):
    # What two real NCCL ranks printed with torch's sampler: rank 0 and rank 1, in two epochs.
    GOLDEN = {
        "1": ["[0, 1, 2, 3] [4, 5, 6, 7]"] * 4,
        "2": ["[4, 7, 2, 1]", "[0, 3, 5, 6]"] * 2,
        "3": ["[4, 7, 2, 1]", "[0, 3, 5, 6]", "[5, 2, 7, 1]", "[4, 6, 3, 0]"],
        "4": ["[2, 3, 1]", "[5, 0, 4]"] * 2,
        "4, dropping the short batch": ["", ""] * 2,
        "5": ["[4, 1, 2]", "[0, 3, 4]"] * 2,
        "5, with set_epoch": ["[4, 1, 2]", "[0, 3, 4]", "[0, 2, 1]", "[4, 3, 0]"],
        "6": ["[4, 7, 3, 0] [6]", "[1, 5, 9, 8] [2]"] * 2,
        "7": ["[4, 7, 3, 0]", "[1, 5, 9, 8]"] * 2,
    }

    def test_the_nine_cases_show_the_golden_batches(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ddp.main(["cases"])

        shown = {}
        for case in out.getvalue().split("\n\n"):
            title = re.search("case (.*?): ", case)[1]
            shown[title] = re.findall(r"epoch \d  rank \d *(.*)", case)
        self.assertEqual(shown, self.GOLDEN)


# ---- The task
class TheTask(unittest.TestCase):
    def test_an_item_depends_on_seed_and_index_alone_also_in_loader_workers(self):
        dataset, longer = ddp.SyntheticDataset(6, 50, seed=1), ddp.SyntheticDataset(100, 50, seed=1)

        loader = DataLoader(dataset, batch_size=None, num_workers=2, sampler=[5, 3, 0, 3])

        expected = [longer[i] for i in (5, 3, 0, 3)]
        torch.testing.assert_close(list(loader), expected, rtol=0, atol=0)

    def test_items_differ_by_index_and_by_seed(self):
        first = [ddp.SyntheticDataset(2, 50, seed)[i][0] for seed, i in ((1, 0), (1, 1), (2, 0))]

        self.assertEqual(len({tuple(x.flatten().tolist()) for x in first}), 3)

    def test_y_is_the_channel_of_x_with_the_largest_moving_sum(self):
        x, y = ddp.SyntheticDataset()[99]

        moving_sum = F.conv1d(x[:, None], torch.ones(1, 1, 3), padding=1)[:, 0]
        self.assertEqual((x.dtype, x.shape), (torch.float32, (3, 10000)))
        self.assertEqual((y.dtype, y.shape), (torch.int64, (10000,)))
        self.assertGreater((moving_sum.argmax(0) == y).double().mean(), 0.9999)

    def test_an_index_out_of_range_is_an_index_error(self):
        for index in (-1, 100):
            with self.assertRaises(IndexError):
                ddp.SyntheticDataset()[index]

    def test_the_net_gives_logits_of_both_signs_for_every_class_and_position(self):
        logits = ddp.ConvNet(num_classes=5)(torch.randn(2, 3, 11))

        self.assertEqual(logits.shape, (2, 5, 11))
        self.assertEqual(set(logits.sign().flatten().tolist()), {-1, 1})


# ---- The step
def uneven_batch():
    """Return 12 samples with a third of the labels ignored, and four of them without any."""
    x, y = next(iter(DataLoader(ddp.SyntheticDataset(12, 40), 12)))
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 1 / 3] = -100
    y[[1, 2, 5, 9]] = -100
    return x, y


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
    F.cross_entropy(logits, y).backward()
    torch.optim.SGD(module.parameters(), lr=1).step()
    loss_sum = F.cross_entropy(logits, y, reduction="sum")
    sums = torch.stack([loss_sum.double(), (logits.argmax(1) == y).sum(), (y >= 0).sum()])
    return list(module.parameters()), sums.detach()


def step_without_labels():
    """Make a step on labels that are all ignored, with a loss that a mask makes zero."""

    def batch_sums(logits, y):
        return (logits.sum(1) * (y != -100)).sum(), torch.zeros(())

    x, y = uneven_batch()
    with mock.patch.object(ddp, "batch_sums", batch_sums):
        return step_on_a_share(x, torch.full_like(y, -100), 3)


def buckets_reduced_in_a_step(micro_batch_size):
    """Return the buckets of gradients that DDP reduces in a step on 4 samples of this rank."""
    buckets = []

    def reduce(state, bucket):
        buckets.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    x, y = uneven_batch()
    model, optimizer = wrapped_net()
    model.register_comm_hook(None, reduce)
    ddp.train_step(model, optimizer, x[:4], y[:4], micro_batch_size)
    return buckets


def operators_of_a_step():
    """Return the names of the operators that a step calls, and at last that of .item()."""
    model, optimizer = wrapped_net()
    x, y = uneven_batch()
    with Operators() as operators:
        ddp.train_step(model, optimizer, x, y, 5)
        torch.zeros(1).item()
    return operators.names


class TheStep(unittest.TestCase):
    def assert_same_step(self, step, expected):
        for tensors, expected_tensors in zip(step, expected, strict=True):
            torch.testing.assert_close(tensors, expected_tensors, rtol=1e-6, atol=1e-6)

    def test_on_any_number_of_ranks_it_is_that_of_one_process_on_the_whole_batch(self):
        x, y = uneven_batch()
        expected = step_of_one_process(x, y)

        for ranks, micro_batch_size in ((1, 12), (1, 5), (2, 6), (2, 4), (3, 4), (3, 1), (4, 2)):
            with self.subTest(ranks=ranks, micro_batch_size=micro_batch_size):
                for step in on_ranks(ranks, step_on_a_share, x, y, micro_batch_size):
                    self.assert_same_step(step, expected)

    def test_without_any_label_it_changes_nothing(self):
        unchanged = list(plain_net().parameters()), torch.zeros(3, dtype=torch.float64)

        for step in on_ranks(2, step_without_labels):
            self.assert_same_step(step, unchanged)

    def test_samples_beyond_the_labels_do_not_count(self):
        x, y = uneven_batch()

        for own in (3, 4):
            step = on_ranks(1, step_on_a_share, x[: own + 1], y[:own], 2)[0]
            self.assert_same_step(step, step_of_one_process(x[:own], y[:own]))

    def test_ranks_exchange_gradients_once_in_a_step(self):
        for micro_batch_size in (4, 2, 1):
            self.assertEqual(on_ranks(2, buckets_reduced_in_a_step, micro_batch_size), [[0], [0]])

    def test_it_calls_no_item_and_no_mask_which_would_wait_for_the_device(self):
        *names, item = on_ranks(1, operators_of_a_step)[0]

        self.assertEqual(item, "_local_scalar_dense")
        self.assertIn("convolution_backward", names)
        self.assertEqual({item, "nonzero", "index"} & set(names), set())  # .item(), masks


# ---- Evaluation
def net_of_rank():
    """Return a net whose BatchNorm has other statistics on each rank."""
    net = nn.Sequential(plain_net(), nn.BatchNorm1d(3))
    if dist.is_initialized():
        net[1].running_mean[0] += dist.get_rank()
    return net


def evaluation(num_samples):
    data = ddp.SyntheticDataset(num_samples, 40)
    sampler = ddp.DistributedSampler(data, shuffle=False, pad=False)
    return ddp.evaluate(net_of_rank(), DataLoader(data, 4, sampler=sampler), CPU)


def logits_of_an_evaluation(amp):
    """Return (dtype, whether training can use them, whether they have a graph) of the logits."""
    seen, module = [], plain_net()
    module.register_forward_hook(lambda module, args, logits: seen.append(logits))
    ddp.evaluate(module, [uneven_batch()], CPU, amp)
    return seen[0].dtype, not seen[0].is_inference(), seen[0].requires_grad


class TheEvaluation(unittest.TestCase):
    def test_on_1_to_4_ranks_it_gives_the_numbers_of_one_batch_in_one_process(self):
        x, y = next(iter(DataLoader(ddp.SyntheticDataset(25, 40), 25)))
        logits = net_of_rank().eval()(x)
        accuracy = (logits.argmax(1) == y).double().mean()
        expected = F.cross_entropy(logits, y).item(), accuracy.item()

        for world_size in (1, 2, 3, 4):
            for numbers in on_ranks(world_size, evaluation, 25):
                np.testing.assert_allclose(numbers, expected, rtol=1e-6)

    def test_a_rank_without_a_sample_takes_part(self):
        one, two = on_ranks(2, evaluation, 1)

        self.assertEqual(one, two)

    def test_without_any_label_it_gives_nan(self):
        self.assertTrue(np.isnan(on_ranks(1, evaluation, 0)).all())

    def test_a_tensor_that_the_net_keeps_from_it_can_be_used_in_training(self):
        self.assertEqual(
            on_ranks(1, logits_of_an_evaluation, False), [(torch.float32, True, False)]
        )

    def test_amp_runs_it_in_bfloat16(self):
        self.assertEqual(
            on_ranks(1, logits_of_an_evaluation, True), [(torch.bfloat16, True, False)]
        )

    def test_the_digest_covers_parameters_and_buffers(self):
        module = net_of_rank()
        digests = {ddp.digest(module)}

        for tensor in (
            module[0][2].bias.data,
            module[1].running_var,
            module[1].num_batches_tracked,
        ):
            tensor += 1
            digests.add(ddp.digest(module))

        self.assertEqual(len(digests), 4)


# ---- The number of GPUs changes the time, not the training
def uneven_task(args):
    """A net without BatchNorm, and data with ignored labels and samples without any label."""
    generator = torch.Generator().manual_seed(1)
    train_set = []
    for x, y in ddp.SyntheticDataset(args.num_samples, 40):
        y[torch.rand(40, generator=generator) < 1 / 3] = -100
        if torch.rand((), generator=generator) < 0.2:
            y[:] = -100
        train_set.append((x, y))
    net = plain_net()
    return train_set, ddp.SyntheticDataset(25, 40, 9), net, torch.optim.Adam(net.parameters())


class TheNumberOfRanks(Test):
    """For nets that treat each sample by itself: BatchNorm and dropout depend on a rank's share."""

    def assert_same_training(self, of_job, expected):
        (out, parameters), (expected_out, expected_parameters) = of_job, expected
        lines = re.findall("epoch .* [|].*", out)
        self.assertEqual(lines, re.findall("epoch .* [|].*", expected_out))
        np.testing.assert_allclose(parameters, expected_parameters, rtol=0, atol=1e-5)

    def test_the_training_is_the_same_on_1_2_3_4_and_6_ranks_with_any_micro_batch(self):
        for more in ("--num-samples 37", "--num-samples 100", "--num-samples 47 --drop-last"):
            options = f"--global-batch-size 12 --epochs 4 {more} --micro-batch-size "
            expected = jobs(1, options + "12", uneven_task)

            for world_size, micro_batch_size in ((1, 5), (2, 4), (3, 4), (4, 2), (6, 2)):
                with self.subTest(more, world_size=world_size):
                    of_job = jobs(world_size, f"{options}{micro_batch_size}", uneven_task)
                    self.assert_same_training(of_job, expected)

    def test_it_is_the_same_when_killed_on_4_ranks_resumed_on_3_then_2_then_6(self):
        options = "--num-samples 100 --global-batch-size 12 --epochs 4"
        expected = jobs(1, options, uneven_task)
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/elastic.pt"

        before = ""
        for world_size, stop_at in ((4, 5), (3, 8), (2, 10)):
            before += jobs(world_size, options, uneven_task, stop_at)[0]
        out, parameters = jobs(6, options, uneven_task)

        self.assertIn("epoch 2, 24 samples read", out)
        self.assert_same_training((before + out, parameters), expected)

    def test_going_on_with_another_global_batch_size_is_said(self):
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {self.folder}/batch.pt"
        jobs(2, f"{options} --global-batch-size 8", stop_at=3)

        out, _ = jobs(2, f"{options} --global-batch-size 4")

        self.assertIn("epoch 0, 16 samples read\nuntil now the global batch size was 8\n", out)


# ---- On the same number of ranks, the same bits
class Regularised(nn.Module):
    """A net with dropout and a layer that only training uses."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv1d(3, 3, 3, padding=1), nn.Conv1d(3, 3, 1)

    def forward(self, x):
        logits = self.body(x)
        if self.training:
            logits = logits + F.dropout(self.head(x), 0.3)
        return logits


def regularised_task(args):
    data = ddp.SyntheticDataset(44, 8), ddp.SyntheticDataset(4, 8)
    return with_sgd(args, *data, Regularised())


class Augmented(ddp.SyntheticDataset):
    """One signal again and again, each time shifted by what PyTorch's generator draws."""

    def __getitem__(self, index):
        x, y = super().__getitem__(0)
        return x + torch.rand(()), y


def augmented_task(args):
    return with_sgd(args, Augmented(24, 8), ddp.SyntheticDataset(4, 8), ddp.ConvNet())


class AfterAKill(Test):
    """Jobs that end before one of their steps, each of which is saved, and go on."""

    def assert_same_bits(self, world_size, stops, options="", task=ddp.make_task, more=""):
        options = f"{SMALL} --global-batch-size {2 * world_size} {options}"
        expected, _ = jobs(world_size, options, task)
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/{self.id()}-{world_size}"

        out = ""
        for stop_at in stops:
            out += jobs(world_size, f"{options} {more}", task, stop_at)[0]
        out += jobs(world_size, options, task)[0]

        self.assertEqual(out.count("resuming from"), len(stops))
        self.assertEqual(re.sub("resuming from.*\n", "", out), expected)  # the digest, too

    def test_a_job_on_2_3_and_5_ranks_ends_as_the_uninterrupted_one(self):
        for world_size, stops in ((2, (4, 12)), (3, (3, 4, 5)), (5, (3,))):
            with self.subTest(world_size=world_size):
                self.assert_same_bits(world_size, stops)

    def test_a_job_with_micro_batches_ends_as_the_uninterrupted_one(self):
        self.assert_same_bits(3, stops=(3, 4), options="--micro-batch-size 1")

    def test_a_job_with_loader_workers_goes_on_without_them_and_ends_as_the_uninterrupted_one(self):
        self.assert_same_bits(3, stops=(3,), options="--epochs 1", more="--num-workers 1")

    def test_a_job_with_dropout_and_a_layer_for_training_ends_as_the_uninterrupted_one(self):
        self.assert_same_bits(3, stops=(3, 5), task=regularised_task)

    def test_a_job_with_augmentation_ends_as_the_uninterrupted_one(self):
        self.assert_same_bits(3, stops=(3,), task=augmented_task)

    def test_a_finished_job_is_not_trained_again(self):
        options = f"{SMALL} --checkpoint {self.folder}/finished.pt"
        first, _ = jobs(2, options)
        written = (self.folder / "finished.pt").read_bytes()

        again, _ = jobs(2, options)

        resuming, digest = again.splitlines()
        self.assertEqual(digest, first.splitlines()[-1])
        self.assertEqual((self.folder / "finished.pt").read_bytes(), written)


# ---- The checkpoint
def job_with_a_path_of_its_own(options):
    """Run a job whose --checkpoint is another file for each rank."""
    return job(f"{options}-{dist.get_rank()}")


def error_of_loss(kind):
    """Return the error of a job with a loss that is infinite, or that has no finite gradient."""

    def batch_sums(logits, y):
        zero = (0 * logits).nan_to_num().sum()
        losses = {"infinite": zero + float("inf"), "without a gradient": zero.sqrt()}
        return losses[kind], torch.zeros(())

    with mock.patch.object(ddp, "batch_sums", batch_sums):
        return error_of_job(SMALL, sgd_task)


def sgd_task(args):
    data = ddp.SyntheticDataset(44, 64), ddp.SyntheticDataset(25, 64, 1)
    return with_sgd(args, *data, plain_net())


class TheCheckpoint(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.options = f"{SMALL} --checkpoint-every 1 --checkpoint"
        cls.path = cls.folder / "first"
        jobs(2, f"{cls.options} {cls.path}", stop_at=3)

    def refusal(self, path, more=""):
        """Return the error with which all ranks of a job refuse a checkpoint."""
        first, second = on_ranks(2, error_of_job, f"{self.options} {path} {more}")
        self.assertEqual(first, second)
        return first

    def refusal_of_changed(self, **changes):
        """Return the error for a copy of a good checkpoint with these changes."""
        torch.save(torch.load(self.path) | changes, self.folder / "changed")
        return self.refusal(self.folder / "changed")

    def test_a_kill_at_any_moment_of_writing_leaves_the_old_one(self):
        path = self.folder / "killed"
        ddp.save_checkpoint(path, {"state": "old"})
        for moment in ("fsync", "replace"):
            process = os.fork()
            if not process:
                try:
                    with mock.patch.object(os, moment, lambda *args: os._exit(9)):
                        ddp.save_checkpoint(path, {"state": "new"})
                finally:
                    os._exit(0)
            _, status = os.waitpid(process, 0)

            self.assertEqual(os.waitstatus_to_exitcode(status), 9)
            self.assertEqual(torch.load(path), {"state": "old"})

    def test_through_a_link_the_file_is_written(self):
        link, path = self.folder / "link", self.folder / "file"
        link.symlink_to(path)

        ddp.save_checkpoint(link, {"state": "new"})

        self.assertTrue(link.is_symlink())
        self.assertEqual(torch.load(path), {"state": "new"})

    def test_a_write_that_fails_leaves_the_old_one_and_nothing_else(self):
        path = self.folder / "alone" / "old"
        path.parent.mkdir()
        ddp.save_checkpoint(path, {"state": "old"})

        with mock.patch.object(os, "fsync", side_effect=OSError("disk full")):
            self.assertRaisesRegex(OSError, "disk full", ddp.save_checkpoint, path, {})

        self.assertEqual(torch.load(path), {"state": "old"})
        self.assertEqual(list(path.parent.iterdir()), [path])

    def test_two_writers_at_once_do_not_disturb_each_other(self):
        path, fsync = self.folder / "both", os.fsync

        def write_another(file):
            with mock.patch.object(os, "fsync", fsync):
                ddp.save_checkpoint(path, {"state": "of the other"})

        with mock.patch.object(os, "fsync", write_another):
            ddp.save_checkpoint(path, {"state": "of the slow one"})

        self.assertEqual(torch.load(path), {"state": "of the slow one"})

    def test_only_rank_0_needs_to_see_it(self):
        shutil.copy(self.path, self.folder / "seen-0")

        ranks = on_ranks(2, job_with_a_path_of_its_own, f"{self.options} {self.folder}/seen")

        self.assertIn("16 samples read", ranks[0][0])
        self.assertEqual(ranks[0][1], ranks[1][1])

    def test_only_rank_0_writes_it(self):
        on_ranks(2, job_with_a_path_of_its_own, f"{self.options} {self.folder}/written")

        self.assertEqual(list(self.folder.glob("written-*")), [self.folder / "written-0"])

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
        saved = torch.load(self.path)["job"]
        for name, value in (
            ("6.weight", [5, 32, 3]),
            ("the optimizer", ["SGD", 12]),
            ("the dataset", "list"),
            ("the name of no parameter", 1),
        ):
            message = self.refusal_of_changed(job=saved | {name: value})
            self.assertIn(f"{name} was {value}, but is {saved.get(name)} here", message)

    def test_one_that_lacks_a_name_of_this_job_is_refused(self):
        saved = torch.load(self.path)["job"]
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

        jobs(2, f"{self.options} {path} --lr 0")

        before, after = torch.load(self.path)["module"], torch.load(path)["module"]
        self.assertTrue(torch.equal(before["0.weight"], after["0.weight"]))
        self.assertFalse(torch.equal(before["1.running_mean"], after["1.running_mean"]))

    def test_a_net_that_is_not_finite_ends_the_job_and_is_not_saved(self):
        options = f"{self.options} {self.folder}/finite"
        jobs(2, options, sgd_task, 3)

        errors = on_ranks(2, error_of_job, f"{options} --lr 1e12", sgd_task)

        saved = torch.load(self.folder / "finite")["module"]
        self.assertIn("FloatingPointError: the loss or a parameter is not finite", errors[1])
        self.assertTrue(all(tensor.isfinite().all() for tensor in saved.values()))

    def test_a_loss_that_is_not_finite_ends_the_job_and_so_does_a_net(self):
        for kind in ("infinite", "without a gradient"):
            for error in on_ranks(2, error_of_loss, kind):
                self.assertIn("FloatingPointError: the loss or a parameter is not finite", error)


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
            loss_sum = F.cross_entropy(module(x), y, reduction="sum")
            (loss_sum / y.numel()).backward()
            optimizer.step()
    return ddp.digest(module)


def steps_of(options, task=ddp.make_task):
    """Return for each step of this rank the seed of PyTorch, the sum of x, the number of labels."""
    steps, train_step = [], ddp.train_step

    def noting_step(model, optimizer, x, y, *args):
        steps.append((torch.initial_seed(), x.sum().item(), y.numel()))
        return train_step(model, optimizer, x, y, *args)

    with mock.patch.object(ddp, "train_step", noting_step):
        job(options, task)
    return steps


def job_with_a_clock(options, terminal):
    """Return what a rank prints if a second passes from one look at the clock to the next."""
    out, seconds = io.StringIO(), itertools.count()
    out.isatty = lambda: terminal
    clock = mock.patch.object(ddp.time, "perf_counter", lambda: next(seconds))
    with clock, contextlib.redirect_stdout(out):
        ddp.train(parse(options), CPU)
    return out.getvalue()


def job_with_1300_pairs_and_1024_files():
    """Return what a rank with a loader worker prints that holds 2600 tensors."""

    def task(args):
        data = [(torch.randn(3, 8), torch.randint(3, (8,))) for _ in range(1300)]
        return with_sgd(args, data, data[:1], plain_net())

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    try:
        return job("--epochs 1 --num-workers 1 --global-batch-size 130", task)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def default_group_of_all_reduce():
    """Return the process group that torch.distributed.nn holds (pytorch/pytorch#190489)."""
    return str(torch.distributed.nn.functional.all_reduce.__defaults__[1])


def task_of(label, num_val_samples, args):
    """A task whose 8 samples have this label at each position."""
    data = [(torch.randn(3, 8), torch.full((8,), label))] * 8
    return with_sgd(args, data, data[:num_val_samples], plain_net())


class TheJob(Test):
    def test_one_rank_trains_what_a_plain_loop_does(self):
        expected = digest_of_a_plain_loop()

        for parallel in ("ddp", "dp"):
            options = f"--seed 7 --lr 0.02 --global-batch-size 4 --parallel {parallel}"
            self.assertIn(expected, jobs(1, f"{SMALL} {options}")[0])

    def test_each_option_changes_what_is_trained(self):
        options = "--epochs 1|--global-batch-size 9|--micro-batch-size 1|--lr 0.1|--drop-last"
        options += "|--amp|--seed 1|--num-samples 40|--length 65|"

        outputs = [jobs(3, f"{SMALL} {option}")[0] for option in options.split("|")]

        self.assertEqual(len({out.splitlines()[-1] for out in outputs}), 10)  # digests

    def test_all_ranks_hold_the_same_net(self):
        first, second, third = (parameters for _, parameters in on_ranks(3, job, SMALL))

        self.assertEqual(first, second)
        self.assertEqual(first, third)

    def test_only_rank_0_prints(self):
        first, second = (out.count("\n") for out, _ in on_ranks(2, job, SMALL))

        self.assertEqual((first, second), (3, 0))

    def test_loss_and_accuracy_are_those_of_all_ranks(self):
        numbers = []
        for data in sgd_task(ddp.make_parser().parse_args([]))[:2]:
            x, y = next(iter(DataLoader(data, len(data))))
            logits = plain_net()(x)
            numbers.append(F.cross_entropy(logits, y).item())
            numbers.append((logits.argmax(1) == y).double().mean().item())

        out, _ = jobs(3, f"{SMALL} --lr 0", sgd_task)

        line = "| loss {:.4f} accuracy {:.3f} | val_loss {:.4f} val_accuracy {:.3f} |"
        self.assertEqual(out.count(line.format(*numbers)), 2)

    def test_amp_reaches_the_evaluation(self):
        out = [jobs(1, f"{SMALL} --lr 0 {amp}", sgd_task)[0] for amp in ("", "--amp")]

        precise, rounded = (re.findall(r"val_loss (\S+)", text) for text in out)
        self.assertNotEqual(precise, rounded)

    def test_samples_a_second_are_those_of_all_ranks(self):
        out, _ = on_ranks(2, job_with_a_clock, SMALL, False)

        self.assertEqual(re.findall(r"([\d.]+) samples/s", out), ["44.0", "44.0"])

    def test_on_a_terminal_a_progress_line_redraws_itself(self):
        out, other = on_ranks(2, job_with_a_clock, f"{SMALL} --epochs 1", True)

        shown = re.findall(r"epoch 0 \| (\S+) samples \| (\S+) samples/s  \r", out)
        self.assertEqual(shown[:3], [("8/44", "8.0"), ("16/44", "8.0"), ("24/44", "8.0")])
        self.assertEqual(shown[5:], [("44/44", "7.3")])
        self.assertEqual(other, "")

    def test_random_numbers_differ_between_ranks_and_steps(self):
        seeds = [seed for steps in on_ranks(3, steps_of, SMALL) for seed, _, _ in steps]

        self.assertEqual(len(seeds), 3 * 2 * 4)
        self.assertEqual(len(set(seeds)), len(seeds))

    def test_augmentation_differs_between_ranks_also_in_loader_workers(self):
        of_ranks = []
        for num_workers in (0, 1):
            options = f"--epochs 1 --num-workers {num_workers}"
            of_ranks += on_ranks(2, steps_of, options, augmented_task)

        self.assertEqual(len({str([x for _, x, _ in steps]) for steps in of_ranks}), 4)

    def test_loader_workers_take_2600_tensors_where_1024_files_may_be_open(self):
        out = on_ranks(1, job_with_1300_pairs_and_1024_files)[0]

        self.assertIn("epoch 0 | loss", out)

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

    def test_no_default_argument_of_pytorch_holds_the_process_group(self):
        self.assertEqual(on_ranks(2, default_group_of_all_reduce), ["None", "None"])


# ---- Launching, failing, ending. Each fault is a script that can be run by hand.
RAISE_ON_RANK_1 = """
def train(args, device):
    if dist.get_rank() == 1:
        raise ValueError("by a test")
    dist.barrier()
ddp.train = train
"""

RAISE_ON_BOTH_RANKS = """
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

TELL_OF_THREADS_AND_SOCKETS = """
import socket
def train(args, device):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            opened = socket.socket(fileno=os.dup(fd))
            if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                print("listens on", opened.getsockname()[0], flush=True)
        except OSError:
            pass  # no socket
    print(torch.get_num_threads(), "threads", flush=True)
    dist.barrier()
ddp.train = train
if __name__ == "__main__":
    del os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(2)
"""


class TheLaunch(Test):
    def test_the_main_job_reports_in_the_agreed_form_that_it_learns(self):
        folder = self.folder / "with # and space"
        folder.mkdir()

        out, err = run(SCRIPT, "--length", 1000, TMPDIR=str(folder))

        numbers = r"loss \d\.\d{4} accuracy [01]\.\d{3}"
        epoch = (
            rf"epoch \d \| {numbers} \| val_{numbers.replace(' acc', ' val_acc')} \| \S+ samples/s"
        )
        version = re.escape(torch.__version__)
        first = f"ddp on gloo, world size 2, cpu, global batch size 8, torch {version}"
        self.assertRegex(out, rf"^{first}\n({epoch}\n){{6}}parameters sha256 [0-9a-f]{{64}}\n$")
        self.assertGreater(float(re.findall(r"val_accuracy (\S+)", out)[-1]), 0.9)
        self.assertEqual((err, list(folder.iterdir())), ("", []))

    def test_a_rank_that_raises_ends_the_job_with_its_traceback_first(self):
        _, err = run(self.script(RAISE_ON_RANK_1), status=1)

        self.assertRegex(err, r"(?s)^rank 1 failed:\nTraceback.*?\nValueError: by a test\n")

    def test_each_rank_that_raises_prints_its_own_traceback(self):
        _, err = run(self.script(RAISE_ON_BOTH_RANKS), status=1)

        self.assertIn("\nValueError: of rank 0\n", err)
        self.assertIn("\nValueError: of rank 1\n", err)

    def test_a_rank_that_is_killed_is_named_and_its_loader_workers_end(self):
        script = self.script(KILL_A_RANK_WHILE_ITS_LOADER_WORKER_IS_IMPORTED)

        _, err = run(script, "--nproc-per-node", 1, "--num-workers", 1, status=1)

        self.assertIn("rank 0 was ended by SIGKILL\n", err)

    def test_ctrl_c_ends_a_job_quietly_also_if_the_launcher_alone_gets_it(self):
        endless = [SCRIPT, *SMALL.split(), "--epochs", 10000, "--nproc-per-node", 1]
        alone, all_at_once = start(*endless), start(*endless)
        for process in (alone, all_at_once):
            process.stdout.readline()
            process.stdout.readline()  # now it trains

        os.kill(alone.pid, signal.SIGINT)
        os.killpg(all_at_once.pid, signal.SIGINT)

        for process in (alone, all_at_once):
            self.assertEqual(finish(process, status=130)[1], "")

    def test_ranks_whose_launcher_is_killed_while_they_are_imported_end(self):
        script = self.script("print('imported', flush=True)")
        process = start(script, "--epochs", 1000000)
        process.stdout.readline()  # in the launcher
        process.stdout.readline()  # in a rank

        process.kill()

        finish(process, status=-signal.SIGKILL)  # It waits for the ranks, too.
        self.assertEqual(process.returncode, -signal.SIGKILL)

    def test_on_one_machine_ranks_share_the_cores_and_listen_on_loopback_alone(self):
        out, _ = run(self.script(TELL_OF_THREADS_AND_SOCKETS))

        self.assertEqual(out.count("1 threads"), 2)
        self.assertEqual(set(re.findall("listens on (.*)", out)), {"127.0.0.1"})

    def test_a_refusal_in_the_job_is_one_line_with_status_2(self):
        path = self.folder / "damaged"
        path.touch()

        _, err = run(SCRIPT, "--checkpoint", path, status=2)

        self.assertRegex(err, r"^ddp_reference.py: error: \S+ is damaged or not a checkpoint .*\n$")


class UnderTorchrun(Test):
    RESTARTING = [*TORCHRUN, "--standalone", "--max-restarts=1", "--nproc-per-node"]

    def test_a_killed_job_on_3_ranks_is_restarted_and_ends_as_the_uninterrupted_one(self):
        script = self.script(KILL_RANK_1_AT_ITS_THIRD_STEP)
        options = f"{SMALL} --checkpoint-every 1 --checkpoint {self.folder}/killed".split()

        no_sharing = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        out, _ = run(*self.RESTARTING, 3, script, *options, **no_sharing)

        self.assertIn("resuming from", out)
        self.assertIn(jobs(3, SMALL)[0].splitlines()[-1], out)

    def test_a_restart_that_would_hang_says_what_to_do(self):
        _, err = run(*self.RESTARTING, 2, self.script(RAISE_ON_RANK_1), status=1)

        self.assertIn("run torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", err)

    def test_its_report_holds_the_traceback_of_the_cause(self):
        script = self.script(RAISE_ON_RANK_1)

        _, err = run(*TORCHRUN, "--standalone", "--nproc-per-node=2", script, status=1)

        self.assertRegex(err, "(?s)Root Cause.*ValueError: by a test")

    def test_two_agents_train_what_one_launch_does(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
        options = [endpoint, "--rdzv-backend=c10d", "--nnodes=2", "--nproc-per-node=1"]
        agent = [*TORCHRUN, *options, SCRIPT, *SMALL.split()]

        agents = [start(*agent, GLOO_SOCKET_IFNAME="lo") for _ in range(2)]

        out = "".join(finish(agent)[0] for agent in agents)
        self.assertIn(jobs(2, SMALL)[0].splitlines()[-1], out)


# ---- Tar shards
def npy(array):
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


def tar(*members, form=tarfile.PAX_FORMAT):
    """Return the bytes of a tar file of (name, data) or (name, data, type) members."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=form) as file:
        for name, data, *kind in members:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(data), (kind or [tarfile.REGTYPE])[0]
            file.addfile(member, io.BytesIO(data))
    return content.getvalue()


def sample_of(number):
    """Return the members of a sample whose x holds nothing but its number."""
    x = np.full((3, 4), number, np.float32)
    return (f"{number:06d}.x.npy", npy(x)), (f"{number:06d}.y.npy", npy(np.zeros(4, int)))


def numbers(stream, **options):
    """Return the numbers of the samples that a stream gives in an epoch."""
    return [int(x[0, 0]) for x, _ in DataLoader(stream, batch_size=None, **options)]


def seed_of_training_shards(options):
    return ddp.make_task(ddp.make_parser().parse_args(options.split()))[0].seed


class TheShards(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for first in range(0, 22, 5):
            samples = map(sample_of, range(first, min(first + 5, 22)))
            (cls.folder / f"{first:02d}.tar").write_bytes(tar(*itertools.chain(*samples)))

    def stream(self, samples_per_epoch=None, num_replicas=1, rank=0, **options):
        return ddp.ShardStream(
            [f"{self.folder}/*.tar"],
            samples_per_epoch,
            num_replicas=num_replicas,
            rank=rank,
            **options,
        )

    def test_members_are_decoded_by_their_names_or_left_as_bytes_or_skipped(self):
        long_key, path = "f" * 120 + "/" + "k" * 120, self.folder / "members"
        members = [
            (".", b"", tarfile.DIRTYPE),
            ("a.x.NPY", npy(np.arange(3))),
            ("a.cls", b" 7\n"),
            ("a.meta.json", b'{"b": [1]}'),
            ("a.link.txt", b"", tarfile.SYMTYPE),
            ("a.txt", "ä".encode()),
            ("README", b"no extension"),
            ("sub/a.cls", b"8"),
            (f"{long_key}.jpg", b"\xff"),
        ]
        for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
            path.write_bytes(tar(*members, form=form))

            first, *others = ddp.read_shard(path)

            self.assertEqual(first.pop("x.npy").tolist(), [0, 1, 2])
            self.assertEqual(first, {"__key__": "a", "cls": 7, "meta.json": {"b": [1]}, "txt": "ä"})
            self.assertEqual(others[0], {"__key__": "sub/a", "cls": 8})
            self.assertEqual(others[1], {"__key__": long_key, "jpg": b"\xff"})

    def test_without_samples_per_epoch_each_sample_is_read_exactly_once(self):
        for num_replicas, num_workers in ((1, 0), (2, 0), (2, 2), (7, 1)):
            read = []
            for rank in range(num_replicas):
                stream = self.stream(num_replicas=num_replicas, rank=rank)
                read += numbers(stream, num_workers=num_workers)

            self.assertEqual(sorted(read), list(range(22)))

    def test_ranks_and_workers_read_equally_much_from_different_streams(self):
        read = [numbers(self.stream(44, 3, rank), num_workers=2) for rank in range(3)]

        self.assertEqual([len(of_rank) for of_rank in read], [15, 15, 15])
        of_workers = {tuple(of_rank[worker:14:2]) for of_rank in read for worker in (0, 1)}
        self.assertEqual(len(of_workers), 6)

    def test_what_is_drawn_depends_on_seed_epoch_and_start(self):
        def drawn(seed, epoch, start):
            stream = self.stream(44, 2, 1, seed=seed)
            stream.set_epoch(epoch, start)
            return numbers(stream)[:20]

        first = drawn(0, 0, 0)

        self.assertEqual(drawn(0, 0, 0), first)
        for other in (drawn(1, 0, 0), drawn(0, 1, 0), drawn(0, 0, 4)):
            self.assertEqual(len(other), 20)
            self.assertNotEqual(other, first)

    def test_the_seed_of_the_command_line_reaches_the_shards(self):
        options = "--seed 3 --shards a --val-shards a --samples-per-epoch 4"

        self.assertEqual(on_ranks(1, seed_of_training_shards, options), [3])

    def test_a_kept_loader_worker_resumes_a_part_of_an_epoch_and_goes_on(self):
        stream, whole = self.stream(20), self.stream(40)
        stream.set_epoch(0, 15)
        whole.set_epoch(0, 15)
        loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)

        first, second = ([int(x[0, 0]) for x, _ in loader] for _ in range(2))

        self.assertEqual((len(first), len(second)), (5, 20))
        self.assertEqual(first + second, numbers(whole, num_workers=1))

    def test_no_part_of_a_shard_is_out_of_reach_of_short_epochs(self):
        stream = self.stream(3, shuffle_buffer=1)

        read = sum((numbers(stream) for _ in range(60)), [])

        self.assertEqual(set(read), set(range(22)))

    def test_the_shuffle_buffer_mixes_samples_of_several_shards(self):
        in_order = np.diff(numbers(self.stream(22, shuffle_buffer=1)))
        mixed = np.diff(numbers(self.stream(22, shuffle_buffer=15)))

        self.assertGreaterEqual((in_order == 1).sum(), 16)
        self.assertLess((mixed == 1).sum(), 9)

    def test_the_first_sample_comes_before_the_buffer_is_full(self):
        source = iter(range(100))

        next(ddp.shuffle_endless(source, 50, np.random.default_rng(0)))

        self.assertEqual(next(source), 2)

    def test_a_resumed_job_trains_on_as_many_samples_as_its_epochs_have(self):
        shards = f"{self.folder}/*.tar --val-shards {self.folder}/*.tar --samples-per-epoch 40"
        options = f"--epochs 2 --checkpoint-every 1 --checkpoint {self.folder}/ck --shards {shards}"
        jobs(3, options, stop_at=3)

        ranks = on_ranks(3, steps_of, options)

        labels = [sum(labels for _, _, labels in step) for step in zip(*ranks, strict=True)]
        self.assertEqual(labels, [4 * samples for samples in (12, 4, 12, 12, 12, 4)])

    def test_what_is_no_shard_is_an_error_that_names_file_and_member(self):
        shard, path = (self.folder / "00.tar").read_bytes(), self.folder / "bad"
        x_name, x = sample_of(0)[0]
        objects = npy(np.array([{}], dtype=object))
        for content, message in (
            (b"", "bad, at its end"),
            (b"PK not a tar" * 100, "bad, at its end"),
            (bytes(1024), "without a sample"),
            (shard[:600], "bad, 000000.x.npy"),
            (shard[:-10240], "cut off|unexpected end"),
            (shard[:1024] + b"garbage!" * 64 + shard[1536:], "damaged"),
            (tar((x_name, x)), "bad, 000000: x.npy or y.npy is missing"),
            (tar((x_name, objects)), "Object arrays cannot"),
            (tar(("a.json", b"[" * 100_000)), "bad, a.json"),
        ):
            path.write_bytes(content)
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                list(ddp.ShardStream([str(path)], num_replicas=1, rank=0))


# ---- The README: what it shows is run
def job_of_script(path, options, stop_at=None):
    """Run job() with the functions that a user's script sets."""
    names = "make_task", "count_labels", "batch_sums"
    originals = {name: getattr(ddp, name) for name in names}
    try:
        runpy.run_path(path)
        return job(options, ddp.make_task, stop_at)
    finally:
        vars(ddp).update(originals)


class TheReadme(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.readme = (HERE / "README.md").read_text()
        cls.diff, *cls.scripts = re.findall(r"```(?:diff|python)\n(.*?)```", cls.readme, re.DOTALL)
        shutil.copy(SCRIPT, cls.folder)

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return path

    def test_the_two_sides_of_its_diff_train_the_same(self):
        lines = self.diff.splitlines(keepends=True)
        plain = self.write("plain.py", "".join(line[1:] for line in lines if line[0] != "+"))
        data_parallel = self.write("ddp.py", "".join(line[1:] for line in lines if line[0] != "-"))

        run(plain, cwd=self.folder)
        expected = torch.load(self.folder / "model.pt")
        run(*TORCHRUN, "--standalone", "--nproc-per-node=2", data_parallel, cwd=self.folder)

        torch.testing.assert_close(torch.load(self.folder / "model.pt"), expected)

    def test_its_script_resumed_on_3_ranks_ends_as_the_uninterrupted_job(self):
        script = self.write("my_job.py", self.scripts[0])
        options = "--global-batch-size 300 --epochs 1"
        expected = on_ranks(3, job_of_script, script, options)[0][0]
        options += f" --checkpoint-every 1 --checkpoint {self.folder}/mine.pt"
        on_ranks(3, job_of_script, script, options, 3)

        out, _ = run(script, *options.split(), "--nproc-per-node", 3)

        self.assertIn("epoch 0, 600 samples read", out)
        self.assertEqual(out.splitlines()[-1], expected.splitlines()[-1])

    def test_its_regression_trains_the_same_on_1_and_3_ranks(self):
        one_number = "image[0, :1, 0]"  # in place of a class
        script = re.sub(r"int\(image.*\)\)", f"{one_number})", self.scripts[0])
        script = script.replace("nn.Linear(288, 2)", "nn.Linear(288, 1)")
        path = self.write("regression.py", script + self.scripts[1])
        options = "--global-batch-size 60 --epochs 2"

        (out, _), *_ = on_ranks(1, job_of_script, path, options)
        (out_of_3, _), *_ = on_ranks(3, job_of_script, path, options)

        self.assertEqual(out.splitlines()[:2], out_of_3.splitlines()[:2])
        self.assertIn("accuracy 0.", out)

    def test_its_shards_can_be_trained_on(self):
        run(self.write("write.py", self.scripts[2]), cwd=self.folder)
        shards = f"{self.folder}/train-*.tar"
        options = f"--epochs 1 --shards {shards} --val-shards {shards} --samples-per-epoch 100"

        out, _ = jobs(2, options)

        self.assertIn("epoch 0 | loss", out)

    def test_the_tests_that_its_checklist_names_exist(self):
        rows = re.findall(r"^\|.*\| `(\w+)` \|[^|]*\|$", self.readme, re.MULTILINE)
        tests = re.findall(r"def (test_\w+)", pathlib.Path(__file__).read_text())

        self.assertGreater(len(rows), 20)
        self.assertEqual([row for row in rows if not any(row in test for test in tests)], [])


# ---- The command line
class TheCommandLine(Test):
    def refusal(self, options, **environ):
        """Return the one line with which a command line is refused, before anything is started."""
        with (
            contextlib.redirect_stderr(io.StringIO()) as err,
            mock.patch.dict(os.environ, environ),
            mock.patch.object(ddp, "launch", side_effect=AssertionError("not refused")),
            self.assertRaisesRegex(SystemExit, "2"),
        ):
            ddp.main(options.split())
        self.assertEqual(err.getvalue().count("\n"), 1)
        return err.getvalue()

    def test_a_number_out_of_range_is_refused_with_the_range(self):
        for option in [
            "--epochs=0",
            "--epochs=1.5",
            "--global-batch-size=-4",
            "--micro-batch-size=0",
            "--num-samples=0",
            "--length=0",
            "--length=100000000000000",
            "--lr=-1",
            "--lr=nan",
            "--lr=inf",
            "--nproc-per-node=0",
            "--num-workers=-1",
            "--seed=-1",
            "--checkpoint-every=0",
            "--samples-per-epoch=0",
        ]:
            with self.subTest(option):
                name, _, value = option.partition("=")
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
        torchrun = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "3"}

        self.assertIn("torchrun's own", self.refusal("--nproc-per-node 2", **torchrun))
        self.assertIn("no multiple of 3", self.refusal("--global-batch-size 8", **torchrun))
        self.assertIn("dp is one process", self.refusal("--parallel dp", **torchrun))


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
            out = self.run_job(options)

            self.assertIn(f"ddp on nccl, world size {GPUS}, cuda, ", out)
            self.assertGreater(float(re.findall(r"val_accuracy (\S+)", out)[-1]), 0.8)

    def test_data_parallel_learns_in_one_process(self):
        out = self.run_job("--parallel dp")

        self.assertIn("dp on nccl, world size 1, cuda, ", out)
        self.assertGreater(float(re.findall(r"val_accuracy (\S+)", out)[-1]), 0.8)

    def test_sync_bn_makes_the_training_the_same_on_1_2_and_3_processes(self):
        options = f"{SMALL} --num-samples 48 --sync-bn --backend gloo --global-batch-size 12"

        losses = {
            re.findall(r"\| loss \S+", self.run_job(f"{options} --nproc-per-node {n}"))[0]
            for n in (1, 2, 3)
        }

        self.assertEqual(len(losses), 1)

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
        torchrun = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "3"}
        sizes = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}

        out, _ = run(script, **torchrun, **sizes, CUDA_VISIBLE_DEVICES=self.VISIBLE.split(",")[0])

        self.assertEqual(out, "nccl\n")


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`."""
    result = unittest.main(exit=False, verbosity=2).result
    bad = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    failed, skipped = len(bad) + len(result.unexpectedSuccesses), len(result.skipped)
    passed = max(0, result.testsRun - failed - skipped)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0 or not result.testsRun)  # -k NAME may be mistyped


if __name__ == "__main__":
    main()
