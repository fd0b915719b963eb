"""The guarantees of ddp_reference.py, in its order: the names of the tests are the list.

    bash run.sh test                             # all of them; also: python -m pytest test_ddp_reference.py
    python test_ddp_reference.py -k sampler      # those with "sampler" in their name

The oracles: torch's own sampler, a single process on the whole batch, an undisturbed run.
"""

import contextlib
import datetime
import functools
import gc
import io
import itertools
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import traceback
import unittest
import unittest.mock
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import ddp_reference as ddp

GPUS = torch.cuda.device_count()
HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = str(HERE / "ddp_reference.py")
CPU = torch.device("cpu")
TORCHRUN = ["-m", "torch.distributed.run"]
SMALL = ["--num-samples", "22", "--length", "64", "--epochs", "2"]

# What two real NCCL ranks printed with torch's sampler (seed 0, batches of 4, two epochs):
# (case, samples, with a sampler, set_epoch called, the loader's drop_last, [epoch][rank] batches).
GOLDEN = [
    ("1", 8, False, False, True, [[[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]]] * 2),
    ("2", 8, True, False, True, [[[[4, 7, 2, 1]], [[0, 3, 5, 6]]]] * 2),
    ("3", 8, True, True, True, [[[[4, 7, 2, 1]], [[0, 3, 5, 6]]], [[[5, 2, 7, 1]], [[4, 6, 3, 0]]]]),
    ("4", 6, True, False, False, [[[[2, 3, 1]], [[5, 0, 4]]]] * 2),
    ("4, dropping the short batch", 6, True, False, True, [[[], []]] * 2),
    ("5", 5, True, False, False, [[[[4, 1, 2]], [[0, 3, 4]]]] * 2),
    ("5, with set_epoch", 5, True, True, False, [[[[4, 1, 2]], [[0, 3, 4]]], [[[0, 2, 1]], [[4, 3, 0]]]]),
    ("6", 10, True, False, False, [[[[4, 7, 3, 0], [6]], [[1, 5, 9, 8], [2]]]] * 2),
    ("7", 10, True, False, True, [[[[4, 7, 3, 0]], [[1, 5, 9, 8]]]] * 2),
]


def environment(**extra):
    """For a subprocess: one thread a rank, no GPU, nothing left over from a launcher."""
    unwanted = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES"}
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    wanted = inherited | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | extra
    return {name: value for name, value in wanted.items() if value is not None}


def start(*command, **extra):
    """Start a Python program in a process group of its own; its output comes through pipes."""
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment(**extra), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def finish(process):
    """(status, stdout, stderr) once every process that holds the output has ended."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def wait_for(process, beginning):
    """Read a process's output up to the line that begins so."""
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"no line begins with {beginning!r}\n{process.stderr.read()}")


def job(*options, **extra):
    """The output of a job that must succeed."""
    status, out, err = finish(start(SCRIPT, *options, **extra))
    if status:
        raise AssertionError(f"status {status}\n{out}\n{err}")
    return out


@functools.cache


def undisturbed(*options):
    """The output of the small job, run through."""
    return job(*SMALL, *options)


def sabotage(function, number, statement):
    """A program text: in each process, a statement goes before the number-th call of a function."""
    return f"""


def sabotaged(original, calls=[]):
    def function(*args, **kwargs):
        calls.append(1)
        if len(calls) == {number}:
            {statement}
        return original(*args, **kwargs)
    return function
{function} = sabotaged({function})
"""


READ = "ddp.SyntheticDataset.__getitem__"
KILL_THE_JOB = "os.killpg(0, signal.SIGKILL)"


def program(folder, text):
    """The path of a program that is ddp_reference.py after some other statements."""
    path = pathlib.Path(folder, "program.py")
    path.write_text(f"import os, resource, signal, sys; sys.path.insert(0, {str(HERE)!r})\n"
                    f"import ddp_reference as ddp\n{text}\n"
                    "if __name__ == '__main__':\n    sys.exit(ddp.main(sys.argv[1:]))\n")
    return path


def epoch_lines(output):
    """The lines of the epochs without their speed, which is never the same twice."""
    return re.findall(r"^epoch \d+ \| .* \|(?= \d)", output, re.MULTILINE)


def digest(output):
    return re.fullmatch(r"parameters sha256 ([0-9a-f]{64})", output.splitlines()[-1])[1]


class Ranks:
    """Processes that are started once and form a new gloo group for each call."""

    processes = []

    @classmethod
    def end(cls):
        for process, pipe in cls.processes:
            pipe.close()
            process.join()

    @classmethod
    def run(cls, world_size, function, *args):
        """[function(rank, *args) of each rank]."""
        context = mp.get_context("spawn")
        while len(cls.processes) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=cls.serve, args=(theirs,))
            process.start()
            cls.processes.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(cls.processes[:world_size]):
                pipe.send((rank, world_size, f"{folder}/store", function, args))
            answers = [pipe.recv() for _, pipe in cls.processes[:world_size]]
        for answer in answers:
            if isinstance(answer, str):
                raise AssertionError(answer)
        return [answer[0] for answer in answers]

    @staticmethod
    def serve(pipe):
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                rank, world_size, path, function, args = pipe.recv()
                dist.init_process_group("gloo", store=dist.FileStore(path, world_size), rank=rank,
                                        world_size=world_size, timeout=datetime.timedelta(seconds=30))
                try:
                    pipe.send((function(rank, *args),))
                    dist.barrier()
                except Exception:
                    pipe.send(traceback.format_exc())
                dist.destroy_process_group()


in_ranks = Ranks.run


def tearDownModule():
    Ranks.end()


class Stop(Exception):
    """Raised in all ranks of a job in place of a kill."""


@contextlib.contextmanager
def before_call(owner, name, do, nth=1):
    """Do something before the nth call of owner.name."""
    original, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(original)
    def replaced(*args, **kwargs):
        if next(calls) == nth:
            do()
        return original(*args, **kwargs)
    with unittest.mock.patch.object(owner, name, replaced):
        yield


def stop():
    raise Stop


def trained_job(rank, options, stop_at=None, net=None):
    """(output, digest) of a job in this process, one of a group; stop_at: it ends before that step."""
    if net:
        ddp.ConvNet = net
    args = ddp.parse_args(["--backend", "gloo", "--nproc-per-node", str(dist.get_world_size()), *options])
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.ExitStack() as stack:
        if stop_at:
            stack.enter_context(contextlib.suppress(Stop))
            stack.enter_context(before_call(torch.optim.Adam, "step", stop, stop_at))
        ddp.train(args, CPU, rank, dist.get_world_size())
    ddp.ConvNet = ConvNet
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return out.getvalue()


ConvNet = ddp.ConvNet


class DropoutNet(ConvNet):
    """A net that draws random numbers in training."""

    masks = []

    def forward(self, x):
        mask = F.dropout(torch.ones(64), 0.5, self.training)
        self.masks.append(tuple(mask.tolist()))
        return super().forward(x) * mask[:x.shape[-1]]


def masks_of_dropout(rank, options):
    DropoutNet.masks.clear()
    trained_job(rank, options, net=DropoutNet)
    return [mask for mask in DropoutNet.masks if len(set(mask)) > 1]


class Augmented(torch.utils.data.Dataset):
    """Items that are random numbers of PyTorch's generator."""

    def __init__(self, num_samples, *_):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return torch.rand(3, 64), torch.zeros(64, dtype=torch.int64)


def augmented_samples(rank, num_workers):
    seen = []
    with unittest.mock.patch.object(ddp, "SyntheticDataset", Augmented):
        args = ddp.parse_args(["--backend", "gloo", *SMALL, "--num-workers", num_workers])
        loader, _, set_epoch = ddp.make_loaders(args, CPU, rank, 2)
        ddp.seed_step(0, 0, 0, rank)
        seen = [x.sum().item() for x, y in loader]
    return seen


def indices(n, epoch=0, start=0, **options):
    """What each rank of options["num_replicas"] reads of n samples."""
    def of_rank(rank):
        sampler = ddp.DistributedSampler(range(n), rank=rank, **options)
        sampler.set_epoch(epoch, start)
        read = list(sampler)
        assert len(read) == len(sampler) == sampler.num_samples
        return read
    return [of_rank(rank) for rank in range(options["num_replicas"])]


def dealt(ranks):
    """The ranks' indices in the order of their positions."""
    return [i for turn in itertools.zip_longest(*ranks) for i in turn if i is not None]


def folder_of(test_class):
    """A temporary folder for the tests of a class."""
    folder = tempfile.TemporaryDirectory()
    test_class.addClassCleanup(folder.cleanup)
    return pathlib.Path(folder.name)


def refusal(test, *options):
    """The one line with which parse_args refuses the options."""
    with contextlib.redirect_stderr(io.StringIO()) as err, test.assertRaises(SystemExit) as end:
        ddp.parse_args(options)
    test.assertEqual(end.exception.code, 2)
    test.assertEqual(err.getvalue().count("\n"), 1)
    return err.getvalue()


class TheSampler(unittest.TestCase):
    ATTRIBUTES = "dataset num_replicas rank epoch drop_last shuffle seed num_samples total_size".split()

    def assert_like_torch(self, n, num_replicas, shuffle, drop_last, seed, epochs):
        for rank in range(num_replicas):
            ours, torchs = (sampler(range(n), num_replicas, rank, shuffle, seed, drop_last)
                            for sampler in (ddp.DistributedSampler, TorchSampler))
            for epoch in epochs:
                ours.set_epoch(epoch)
                torchs.set_epoch(epoch)
                self.assertEqual(list(ours), list(torchs))
            self.assertEqual(len(ours), len(torchs))
            for name in self.ATTRIBUTES:
                self.assertEqual(getattr(ours, name), getattr(torchs, name), name)

    def test_it_gives_the_indices_of_torchs_sampler_for_every_small_case(self):
        for n, num_replicas, shuffle, drop_last, seed in itertools.product(
                range(26), range(1, 9), (True, False), (True, False), (0, 7)):
            with self.subTest(n=n, num_replicas=num_replicas, shuffle=shuffle, drop_last=drop_last, seed=seed):
                self.assert_like_torch(n, num_replicas, shuffle, drop_last, seed, (0, 1, 5))

    def test_it_gives_the_indices_of_torchs_sampler_for_large_data_sets(self):
        for n, num_replicas in ((8191, 1), (8192, 1), (8193, 1), (100_003, 7), (300_000, 3)):
            for shuffle, drop_last in itertools.product((True, False), repeat=2):
                self.assert_like_torch(n, num_replicas, shuffle, drop_last, 3, (2,))

    def test_the_int32_permutation_it_uses_is_the_int64_permutation_torch_uses(self):
        for n in (0, 1, 2, 1000, 20_000, 100_000, 3_000_000):
            small, large = (torch.randperm(n, generator=torch.Generator().manual_seed(n), dtype=dtype)
                            for dtype in (torch.int32, torch.int64))
            self.assertTrue(torch.equal(small, large))

    def test_a_loader_reads_with_it_what_two_real_ranks_read_in_nine_experiments(self):
        for case, n, with_sampler, calls_set_epoch, drop_last, epochs in GOLDEN:
            for rank in range(2):
                sampler = ddp.DistributedSampler(range(n), 2, rank) if with_sampler else None
                loader = DataLoader(range(n), 4, sampler=sampler, drop_last=drop_last)
                for epoch in range(2):
                    if calls_set_epoch:
                        sampler.set_epoch(epoch)
                    with self.subTest(case=case, rank=rank, epoch=epoch), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        self.assertEqual([batch.tolist() for batch in loader], epochs[epoch][rank])

    def test_without_padding_every_sample_is_read_exactly_once(self):
        for n, num_replicas, shuffle in itertools.product(range(26), range(1, 9), (True, False)):
            ranks = indices(n, num_replicas=num_replicas, shuffle=shuffle, pad=False)
            self.assertEqual(sorted(dealt(ranks)), list(range(n)))
            self.assertLessEqual(max(map(len, ranks)) - min(map(len, ranks)), 1)

    def test_drop_last_drops_also_where_it_would_not_pad(self):
        self.assertEqual([len(rank) for rank in indices(10, num_replicas=4, drop_last=True, pad=False)], [2] * 4)

    def test_after_any_start_any_number_of_ranks_reads_the_rest_once(self):
        for n, start, num_replicas in itertools.product((0, 1, 7, 24), range(25), range(1, 7)):
            if start <= n:
                order = indices(n, epoch=3, num_replicas=1)[0]
                rest = indices(n, epoch=3, start=start, num_replicas=num_replicas, pad=False)
                self.assertEqual(dealt(rest), order[start:])
                padded = dealt(indices(n, epoch=3, start=start, num_replicas=num_replicas))
                self.assertEqual(padded[:n - start], order[start:])
                self.assertEqual(padded[n - start:], (order * 7)[:-(n - start) % num_replicas])
                dropped = dealt(indices(n, epoch=3, start=start, num_replicas=num_replicas, drop_last=True))
                self.assertEqual(dropped, order[start:start + (n - start) // num_replicas * num_replicas])

    def test_after_k_samples_on_each_rank_it_goes_on_as_if_it_had_not_stopped(self):
        for options in ({}, {"drop_last": True}, {"pad": False}, {"shuffle": False}):
            whole = indices(23, epoch=1, num_replicas=4, **options)
            for k in range(6):
                rest = indices(23, epoch=1, start=4 * k, num_replicas=4, **options)
                self.assertEqual(rest, [rank[k:] for rank in whole])

    def test_a_second_pass_without_set_epoch_warns_once_and_names_the_remedy(self):
        sampler = ddp.DistributedSampler(range(5), 2, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for epoch in range(3):
                sampler.set_epoch(epoch)
                list(sampler)
            unshuffled = ddp.DistributedSampler(range(5), 2, 0, shuffle=False)
            list(unshuffled), list(unshuffled)
        with self.assertWarnsRegex(UserWarning, r"set_epoch\(epoch\)"):
            list(sampler)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(sampler)

    def test_it_takes_four_bytes_a_sample_and_its_own_part(self):
        class Counted(torch.utils._python_dispatch.TorchDispatchMode):
            largest = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor) and result._base is None:
                    Counted.largest = max(Counted.largest, result.untyped_storage().nbytes())
                return result
        with Counted():
            iterator = iter(ddp.DistributedSampler(range(100_000), 8, 3))
        self.assertLessEqual(Counted.largest, 400_000)
        held = [t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor and len(t.shape) == 1]
        self.assertLessEqual(max(held), 50_000)
        self.assertIsInstance(next(iterator), int)
        unshuffled = iter(ddp.DistributedSampler(range(2**50), 2**20, 5, shuffle=False))
        self.assertEqual([next(unshuffled), next(unshuffled)], [5, 5 + 2**20])

    def test_a_number_out_of_range_is_a_value_error_that_says_the_range(self):
        for arguments, message in (((2, 2), r"rank is 2, but must be in \[0, 2\)"), ((2, -1), "rank is -1"),
                                   ((0, 0), "num_replicas is 0, but must be at least 1")):
            with self.assertRaisesRegex(ValueError, message):
                ddp.DistributedSampler(range(5), *arguments)
        for start in (-1, 6):
            with self.assertRaisesRegex(ValueError, rf"start is {start}, but must be in \[0, 5\]"):
                ddp.DistributedSampler(range(5), 2, 0).set_epoch(0, start)

    def test_a_data_set_without_a_length_is_a_type_error_that_points_at_streaming(self):
        with self.assertRaisesRegex(TypeError, "generator has no length.*IterableDataset"):
            ddp.DistributedSampler((i for i in range(5)), 2, 0)


class TheDataSetAndTheNet(unittest.TestCase):
    def test_an_item_depends_on_seed_and_index_alone_also_in_loader_workers(self):
        dataset = ddp.SyntheticDataset(6, 50, seed=1)
        in_workers = list(DataLoader(dataset, batch_size=None, num_workers=2, sampler=[5, 3, 0, 3]))
        for (x, y), i in zip(in_workers, [5, 3, 0, 3]):
            again = ddp.SyntheticDataset(100, 50, seed=1)[i]
            self.assertTrue(torch.equal(x, again[0]) and torch.equal(y, again[1]))
        self.assertFalse(torch.equal(dataset[0][0], dataset[1][0]))
        self.assertFalse(torch.equal(dataset[0][0], ddp.SyntheticDataset(6, 50, seed=2)[0][0]))

    def test_x_is_standard_normal_and_y_the_channel_with_the_largest_moving_sum(self):
        x, y = ddp.SyntheticDataset()[99]
        self.assertEqual((x.dtype, x.shape, y.dtype, y.shape),
                         (torch.float32, (3, 10000), torch.int64, (10000,)))
        self.assertAlmostEqual(float(x.mean()), 0, delta=0.03)
        self.assertAlmostEqual(float(x.std()), 1, delta=0.03)
        sums = F.conv1d(x[:, None], torch.ones(1, 1, 3), padding=1)[:, 0]
        self.assertGreater((sums.argmax(0) == y).double().mean(), 0.9999)

    def test_an_index_out_of_range_is_an_index_error(self):
        for i in (-1, 100):
            with self.assertRaises(IndexError):
                ddp.SyntheticDataset()[i]

    def test_the_net_gives_a_logit_of_either_sign_for_every_class_and_position(self):
        logits = ddp.ConvNet(num_classes=5)(torch.randn(2, 3, 11))
        self.assertEqual(logits.shape, (2, 5, 11))
        self.assertTrue((logits < 0).any() and (logits > 0).any())


class FrozenNorm(ddp.ConvNet):
    """The net with BatchNorm always in eval mode.

    In training BatchNorm normalises by the statistics of the batch it sees, and a rank, or one batch of
    a window, is another batch than the whole one of a single process: they would not be comparable.
    """

    def train(self, mode=True):
        return super().train(False)


def net(kind=FrozenNorm):
    torch.manual_seed(0)
    return kind()


def trained(model, loader, **options):
    """What train_steps makes of a model, with SGD: (state, samples at each step, sums)."""
    sums = torch.zeros(4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = list(ddp.train_steps(model, loader, optimizer, CPU, sums, **options))
    return getattr(model, "module", model).state_dict(), samples, sums


def evaluated(rank, world_size, num_samples=25):
    """What evaluate() says on one of world_size ranks."""
    data = ddp.SyntheticDataset(num_samples, 40)
    sampler = ddp.DistributedSampler(data, world_size, rank, shuffle=False, pad=False)
    model = DistributedDataParallel(net(ddp.ConvNet)) if world_size > 1 else net(ddp.ConvNet)
    return ddp.evaluate(model, DataLoader(data, 4, sampler=sampler), CPU)


def on_each_of_two_ranks(rank):
    result = {"evaluated": evaluated(rank, 2), "evaluated one sample": evaluated(rank, 2, num_samples=1)}

    data = ddp.SyntheticDataset(8, 40)
    x, y = (torch.stack(part) for part in zip(*data))
    model = DistributedDataParallel(net().eval())
    F.cross_entropy(model(x[rank::2]), y[rank::2]).backward()
    result["gradients"] = [parameter.grad for parameter in model.parameters()]

    sampler = ddp.DistributedSampler(range(10))  # num_replicas and rank are those of the group
    result["batches"] = [batch.tolist() for batch in DataLoader(range(10), 4, sampler=sampler)]

    buckets = []

    def counted(group, bucket):
        buckets.append(bucket)
        return allreduce_hook(group, bucket)
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    model.register_comm_hook(None, counted)
    loader = DataLoader(data, 1, sampler=ddp.DistributedSampler(data))
    result["accumulated"] = trained(model, loader, accumulate=2)
    result["communications"] = len(buckets)
    result["held"] = str(torch.distributed.nn.functional.all_reduce.__defaults__[1])

    with contextlib.redirect_stdout(io.StringIO()) as out:
        args = ddp.parse_args(["--backend", "gloo", *SMALL])
        module = ddp.train(args, CPU, rank, 2)
    result["output"], result["digest"] = out.getvalue(), ddp.digest(module)

    optimizer = torch.optim.Adam(module.parameters())
    with tempfile.TemporaryDirectory() as folder:  # each rank has its own, and only rank 0 a file in it
        args.checkpoint = f"{folder}/ck.pt"
        if rank == 0:
            ddp.save_checkpoint(args.checkpoint, dict(job=args.job, module=module.state_dict(), epoch=1, samples=4,
                                                      optimizer=optimizer.state_dict(), sums=[1, 2, 3]))
        try:
            ddp.resume(args, CPU, module, optimizer)
        except RuntimeError as error:
            result["different checkpoints"] = str(error)
    return result


class TheLoop(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ranks = in_ranks(2, on_each_of_two_ranks)

    def assert_same_state(self, one, other):
        self.assertEqual(one.keys(), other.keys())
        for name in one:
            torch.testing.assert_close(one[name], other[name], msg=name)

    def test_gradients_on_two_ranks_are_those_of_a_single_process_on_the_whole_batch(self):
        module = net().eval()
        x, y = (torch.stack(part) for part in zip(*ddp.SyntheticDataset(8, 40)))
        F.cross_entropy(module(x), y).backward()
        for rank in self.ranks:
            for gradient, parameter in zip(rank["gradients"], module.parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad)

    def test_two_ranks_read_the_golden_batches(self):
        self.assertEqual([rank["batches"] for rank in self.ranks], GOLDEN[7][5][0])

    def test_all_ranks_hold_the_same_parameters_and_buffers_after_training(self):
        self.assertEqual(self.ranks[0]["digest"], self.ranks[1]["digest"])

    def test_rank_0_alone_speaks_and_the_digest_it_prints_is_that_of_every_rank(self):
        self.assertEqual(digest(self.ranks[0]["output"]), self.ranks[1]["digest"])
        self.assertEqual(self.ranks[1]["output"], "")

    def test_accumulating_on_two_ranks_equals_one_step_of_one_process_on_all_their_batches(self):
        data = ddp.SyntheticDataset(8, 40)
        loader = DataLoader(data, 4, sampler=ddp.DistributedSampler(data, 1, 0))
        state, samples, sums = trained(net(), loader)
        self.assertEqual(samples, [0, 4, 8])
        for rank in self.ranks:
            self.assert_same_state(rank["accumulated"][0], state)
            self.assertEqual(rank["accumulated"][1], [0, 2, 4])
        torch.testing.assert_close(sum(rank["accumulated"][2] for rank in self.ranks)[:3], sums[:3], rtol=1e-6, atol=0)

    def test_the_ranks_communicate_only_on_the_last_batch_of_a_window(self):
        self.assertEqual(self.ranks[0]["communications"], 2)  # one bucket, two windows of two batches

    def test_ranks_that_find_different_checkpoints_do_not_train(self):
        for rank in self.ranks:
            self.assertIn("the ranks find different checkpoints", rank["different checkpoints"])

    def test_no_default_argument_of_pytorch_holds_the_process_group(self):
        # Else it outlives destroy_process_group, and its threads abort the interpreter now and then.
        self.assertEqual([rank["held"] for rank in self.ranks], ["None", "None"])

    def test_the_jobs_validation_loader_reads_every_sample_once_over_all_ranks(self):
        args = ddp.parse_args(["--backend", "gloo", *SMALL])
        loaders = [ddp.make_loaders(args, CPU, rank, 3)[1] for rank in range(3)]
        read = [tuple(x[:3].tolist()) for loader in loaders for batch, _ in loader for x in batch[:, 0]]
        self.assertEqual((len(read), len(set(read))), (25, 25))

    def test_the_digest_covers_parameters_and_buffers(self):
        module = net(ddp.ConvNet)
        digests = {ddp.digest(module)}
        for tensor in (module.conv3.bias.data, module.bn1.running_var, module.bn2.num_batches_tracked):
            tensor += 1
            digests.add(ddp.digest(module))
        self.assertEqual(len(digests), 4)

    def test_the_last_short_window_is_a_step_by_the_mean_of_its_own_batches(self):
        data = ddp.SyntheticDataset(5, 40)
        state, samples, _ = trained(net(), DataLoader(data, 1), accumulate=2)
        self.assertEqual(samples, [0, 2, 4, 5])
        expected, *_ = trained(net(), DataLoader(data, batch_sampler=[[0, 1], [2, 3], [4]]))
        self.assert_same_state(state, expected)

    def test_amp_runs_the_net_in_bfloat16_and_keeps_float32_parameters(self):
        seen = []
        module = net(ddp.ConvNet)
        module.conv2.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
        trained(module, DataLoader(ddp.SyntheticDataset(2, 40)), amp=True)
        self.assertEqual(set(seen), {torch.bfloat16})
        self.assertEqual({parameter.dtype for parameter in module.parameters()}, {torch.float32})

    def test_evaluation_gives_the_numbers_of_a_plain_loop_on_1_2_and_3_ranks(self):
        module = net(ddp.ConvNet).eval()
        losses, correct = [], []
        with torch.no_grad():
            for x, y in ddp.SyntheticDataset(25, 40):
                logits = module(x[None])
                losses.append(F.cross_entropy(logits, y[None]).item())
                correct.append((logits.argmax(1) == y).double().mean().item())
        results = [evaluated(0, 1), *(rank["evaluated"] for rank in self.ranks), *in_ranks(3, evaluated, 3)]
        for loss, accuracy in results:
            self.assertAlmostEqual(loss, sum(losses) / 25, places=6)
            self.assertAlmostEqual(accuracy, sum(correct) / 25, places=6)

    def test_a_rank_without_a_sample_takes_part_in_the_evaluation(self):
        for rank in self.ranks:
            for ours, single in zip(rank["evaluated one sample"], evaluated(0, 1, num_samples=1)):
                self.assertAlmostEqual(ours, single, places=6)

    def test_the_steps_wait_for_the_device_nowhere(self):
        # .item(), .tolist(), bool() and the like all call this operator.
        class NoSynchronisation(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                assert function is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
                return function(*args, **(kwargs or {}))
        module, batch = net(), [part[None] for part in ddp.SyntheticDataset(1, 40)[0]]
        with NoSynchronisation():
            trained(module, [batch] * 3, accumulate=2)
            with self.assertRaises(AssertionError):
                torch.zeros(1).item()


class TheCheckpoint(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = folder_of(cls)
        # Killed before its second checkpoint: the first is of epoch 0 after one step, 8 of 22 samples.
        cls.path = cls.folder / "first.pt"
        cls.options = [*SMALL, "--checkpoint-every", "1", "--checkpoint"]
        cls.sabotaged(sabotage("os.fsync", 3, KILL_THE_JOB), *cls.options, cls.path)

    @classmethod
    def sabotaged(cls, text, *options, launcher=()):
        return finish(start(*launcher, program(cls.folder, text), *options))

    def copy(self, name):
        return pathlib.Path(shutil.copy(self.path, self.folder / name))

    def assert_same_end(self, outputs, *options):
        """Together the outputs hold each epoch's line of an undisturbed job, and its digest."""
        expected = undisturbed(*options)
        self.assertEqual(digest(outputs[-1]), digest(expected))
        lines = [line for output in outputs for line in epoch_lines(output)]
        self.assertEqual(list(dict.fromkeys(lines)), epoch_lines(expected))

    def kill_again_and_again(self, path, points, *more):
        """Kill a job at each of the points, each time resuming it, and at last let it end: the outputs."""
        outputs = []
        for function, number, statement in points:
            status, out, err = self.sabotaged(sabotage(function, number, statement), *self.options, path, *more)
            self.assertNotEqual(status, 0)
            outputs.append(out)
            if path.exists():
                torch.load(path, weights_only=True)
            self.assertLessEqual(len(list(self.folder.glob(f".{path.name}*"))), 1)
        self.assertIn("resuming from", outputs[-1])
        return outputs + [job(*self.options, path, *more)]

    def test_a_job_killed_in_mid_epoch_ends_as_if_it_had_not_been(self):
        # With accumulation, so a checkpoint must fall on a step, and loader workers, which read ahead.
        path, more = self.folder / "killed.pt", ["--accumulate", "2", "--num-workers", "1"]
        status, out, err = self.sabotaged(sabotage("os.fsync", 3, KILL_THE_JOB), *self.options, path, *more)
        self.assertEqual(torch.load(path)["samples"], 16)
        outputs = self.kill_again_and_again(path, [
            (READ, 5, "if os.environ['RANK'] == '1': os.kill(os.getppid(), signal.SIGKILL), os._exit(1)")],
            *more)
        self.assert_same_end([out, *outputs], *more)
        before = path.read_bytes()
        again = job(*self.options, path, *more, "--parallel", "none")
        self.assertIn("holds 2 finished epochs", again)
        self.assertEqual(digest(again), digest(undisturbed(*more)))
        self.assertEqual(path.read_bytes(), before)

    def test_a_job_killed_while_it_writes_a_checkpoint_ends_as_if_it_had_not_been(self):
        outputs = self.kill_again_and_again(self.folder / "written.pt", [
            ("os.fsync", 1, KILL_THE_JOB),  # the first one is written, but not renamed
            ("os.fsync", 3, KILL_THE_JOB),  # the same with the second
            ("os.fsync", 4, KILL_THE_JOB),  # renamed, but the folder not flushed
        ], "--parallel", "none")
        self.assert_same_end(outputs, "--parallel", "none")
        self.assertEqual(list(self.folder.glob(".written.pt*")), [])

    def test_another_number_of_ranks_reads_the_rest_of_the_epoch_and_nothing_twice(self):
        text = ("def logged(self, i, original=ddp.SyntheticDataset.__getitem__):\n"
                "    if self.seed == 0:\n"
                "        print(i, file=open(os.environ['READ'] + os.environ['RANK'], 'a'))\n"
                "    return original(self, i)\n"
                "ddp.SyntheticDataset.__getitem__ = logged\n" +
                sabotage("ddp.save_checkpoint", 1, "assert os.environ['RANK'] == '0', 'two ranks write'"))
        script, jobs = program(self.folder, text), {}
        for num_replicas in (1, 3):
            jobs[num_replicas] = start(script, *self.options, self.copy(f"elastic{num_replicas}.pt"),
                                       "--nproc-per-node", num_replicas, READ=f"{self.folder}/read{num_replicas}.")
        for num_replicas, process in jobs.items():
            status, out, err = finish(process)
            self.assertEqual(status, 0, err)
            self.assertIn("epoch 0, sample 8 of 22", out)
            read = [[int(i) for i in (self.folder / f"read{num_replicas}.{rank}").read_text().split()]
                    for rank in range(num_replicas)]
            rest, new = (indices(22, *place, num_replicas=num_replicas) for place in ((0, 8), (1, 0)))
            # Before that each rank reads sample 0, to settle DDP's buckets.
            self.assertEqual(read, [[0] * (num_replicas > 0) + a + b for a, b in zip(rest, new)])

    def test_a_write_that_fails_ends_the_job_with_the_reason_and_the_old_file(self):
        path = self.copy("full.pt")
        limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))"
        status, out, err = self.sabotaged(limit, *self.options, path, "--parallel", "none")
        self.assertEqual(status, 1)
        self.assertIn("File too large", err)
        self.assertEqual(path.read_bytes(), self.path.read_bytes())
        self.assertEqual(list(self.folder.glob(".full*")), [])

    def test_a_checkpoint_through_a_link_replaces_the_file_and_not_the_link(self):
        target, link = self.folder / "target.pt", self.folder / "link.pt"
        link.symlink_to(target)
        ddp.save_checkpoint(str(link), {"epoch": 1})
        self.assertTrue(link.is_symlink())
        self.assertEqual(torch.load(target), {"epoch": 1})

    def test_sigterm_to_one_rank_stops_all_at_a_step_with_a_checkpoint_and_status_143(self):
        path = self.folder / "terminated.pt"
        options = [*SMALL, "--log-interval", "1", "--checkpoint", path]
        status, out, err = self.sabotaged(
            sabotage(READ, 6, "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGTERM)") +
            sabotage("os.fsync", 1, "import time; time.sleep(5)"),  # a slow disk: rank 1 has to stay for it
            *options)
        self.assertEqual((status, err), (143, ""))
        self.assertIn("stopped by SIGTERM: epoch 0, sample 16 of 22", out)
        self.assert_same_end([out, job(*options)])

    def test_sigterm_to_the_job_reaches_its_ranks_and_spares_the_loader_workers(self):
        paths = self.folder / "forwarded0.pt", self.folder / "forwarded1.pt"
        jobs = [start(SCRIPT, *SMALL, "--epochs", "1000000", "--num-workers", "1", "--checkpoint", path)
                for path in paths]
        for process in jobs:
            wait_for(process, "epoch")
        jobs[0].terminate()
        os.killpg(jobs[1].pid, signal.SIGTERM)
        for process, path in zip(jobs, paths):
            status, out, err = finish(process)
            self.assertEqual((status, err), (143, ""))
            self.assertTrue(out.splitlines()[-1].startswith("stopped by SIGTERM"))
            torch.load(path, weights_only=True)

    def test_without_a_checkpoint_sigterm_ends_the_job_at_once(self):
        process = start(SCRIPT, *SMALL, "--epochs", "1000000")
        wait_for(process, "epoch 0")
        process.terminate()
        self.assertEqual(finish(process)[0], -signal.SIGTERM)

    def test_a_net_that_is_not_finite_does_not_replace_the_checkpoint(self):
        path = self.folder / "finite.pt"
        options = ["--num-samples", "4", "--length", "8", "--parallel", "none", "--epochs", "1"]
        with self.assertRaisesRegex(FloatingPointError, "validation loss"), contextlib.redirect_stdout(io.StringIO()):
            ddp.train(ddp.parse_args([*options, "--lr", "1e30"]), CPU, 0, 1)
        with contextlib.redirect_stdout(io.StringIO()):
            ddp.train(ddp.parse_args([*options, "--checkpoint", str(path)]), CPU, 0, 1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        before = path.read_bytes()
        spoilt = "import gc\n" + sabotage("ddp.total_over_ranks", 1,
                                          "[net.conv1.bias.data.fill_(float('nan')) for net in gc.get_objects()"
                                          " if type(net) is ddp.ConvNet]")
        status, out, err = self.sabotaged(spoilt, *options, "--epochs", "2", "--checkpoint", path,
                                          "--checkpoint-every", "1")
        self.assertEqual(status, 1)
        self.assertIn("the net is not finite in epoch 1, after sample 4", err)
        self.assertEqual(path.read_bytes(), before)

    def test_resuming_takes_the_learning_rate_from_the_command_line_and_keeps_adams_counters_on_the_cpu(self):
        args = ddp.parse_args([*map(str, self.options), str(self.path), "--lr", "0.5", "--backend", "gloo"])
        module = net(ddp.ConvNet)
        optimizer = torch.optim.Adam(module.parameters())
        self.assertEqual(ddp.resume(args, CPU, module, optimizer)[:2], (0, 8))
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.5)
        for state in optimizer.state_dict()["state"].values():
            self.assertEqual((state["step"].device, state["step"].item()), (CPU, 1))

    def test_torchrun_restarts_a_killed_rank_and_the_job_ends_undisturbed(self):
        text = sabotage(READ, 6, "if os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '10':"
                                 " os.kill(os.getpid(), signal.SIGKILL)")
        # After the restart rank 0 comes late: would rank 1 wait for it, or find its last address?
        text += ("if os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '01':\n"
                 "    import time; time.sleep(1.5)\n")
        status, out, err = self.sabotaged(
            text, *self.options, self.folder / "restarted.pt",
            launcher=[*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1"])
        self.assertEqual(status, 0, err)
        self.assertIn("resuming from", out)
        self.assert_same_end([out])

    def refusal(self, path, *options):
        return refusal(self, *self.options, str(path), "--nproc-per-node", "2", "--backend", "gloo", *options)

    def test_a_file_that_is_no_checkpoint_is_refused_and_left_as_it_is(self):
        whole = self.path.read_bytes()
        torch.save({"epoch": 3}, self.folder / "foreign.pt")
        foreign = (self.folder / "foreign.pt").read_bytes()
        path = self.folder / "bad.pt"
        for content in (b"", b"not a checkpoint", foreign, *(whole[:n] for n in (10, 5000, len(whole) - 1))):
            path.write_bytes(content)
            self.assertRegex(self.refusal(path), "bad.pt is damaged or not a checkpoint")
            self.assertEqual(path.read_bytes(), content)

    def test_a_checkpoint_of_another_data_set_seed_or_net_is_refused_with_the_difference(self):
        for option, name, value in (("--num-samples", "number of samples", "22"), ("--length", "length", "64"),
                                    ("--seed", "seed", "0")):
            self.assertIn(f"its {name} is {value}, but here it is 99", self.refusal(self.path, option, "99"))
        state = torch.load(self.path)
        state["module"]["conv1.weight"] = torch.zeros(8, 3, 3)
        torch.save(state, self.folder / "net.pt")
        self.assertIn("its conv1.weight is [8, 3, 3], but here it is [16, 3, 3]",
                      self.refusal(self.folder / "net.pt"))

    def test_a_checkpoint_that_would_execute_something_is_refused_and_does_not(self):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(TheCheckpoint.folder / "executed"),)
        torch.save(torch.load(self.path) | {"evil": Evil()}, self.folder / "evil.pt")
        self.assertIn("UnpicklingError", self.refusal(self.folder / "evil.pt"))
        self.assertFalse((self.folder / "executed").exists())

    def test_a_place_that_cannot_be_written_is_refused(self):
        self.assertIn("nowhere: No such file", self.refusal(self.folder / "nowhere" / "a.pt"))
        if sys.platform == "linux":  # where os.access says yes to root
            self.assertIn("cannot create a file in /proc", self.refusal("/proc/x.pt"))
        self.assertIn("cannot be read: Is a directory", self.refusal(self.folder))
        self.assertIn("argument --checkpoint: it is empty", self.refusal(""))

    def test_checkpoint_every_needs_a_path(self):
        self.assertIn("needs --checkpoint", refusal(self, "--checkpoint-every", "1"))
        self.assertIn("of at least 1", refusal(self, "--checkpoint-every", "0"))


class TheJob(unittest.TestCase):
    def test_the_main_job_learns_and_reports_in_the_agreed_form(self):
        lines = job().splitlines()
        self.assertEqual(lines[0], f"gloo, world size 2, cpu, torch {torch.__version__}")
        number = r"\d+\.\d{4}"
        for epoch, line in enumerate(lines[1:-1]):
            self.assertRegex(line, rf"^epoch {epoch} \| loss {number} accuracy [01]\.\d{{3}} \| "
                                   rf"val_loss {number} val_accuracy [01]\.\d{{3}} \| \d+\.\d samples/s$")
        losses = [float(line.split()[4]) for line in lines[1:-1]]
        self.assertEqual(losses, sorted(losses, reverse=True))
        self.assertGreater(float(lines[-2].split()[11]), 0.9)
        self.assertRegex(lines[-1], "^parameters sha256 [0-9a-f]{64}$")

    def test_spawn_torchrun_and_two_nodes_train_the_same_model(self):
        spawned = undisturbed()
        standalone = start(*TORCHRUN, "--standalone", "--nproc-per-node=2", SCRIPT, *SMALL)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        nodes = [start(*TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1",
                       f"--master-port={port}", "--nproc-per-node=1", SCRIPT, *SMALL, GLOO_SOCKET_IFNAME="lo")
                 for node in range(2)]
        one_node, *two_nodes = (finish(process) for process in (standalone, *nodes))
        self.assertEqual([status for status, *_ in (one_node, *two_nodes)], [0, 0, 0], (one_node, two_nodes))
        for output in (one_node[1], two_nodes[0][1]):
            self.assertEqual(epoch_lines(output), epoch_lines(spawned))
            self.assertEqual(digest(output), digest(spawned))

    def test_two_jobs_at_once_do_not_disturb_each_other_and_loader_workers_change_nothing(self):
        jobs = [start(SCRIPT, *SMALL), start(SCRIPT, *SMALL, "--num-workers", "1")]
        (status, out, err), (status2, out2, err2) = map(finish, jobs)
        self.assertEqual((status, status2), (0, 0), err + err2)
        self.assertEqual(digest(out), digest(out2))

    @staticmethod
    @functools.cache
    def job_whose_rank_1_raises():
        text = ("import atexit, torch\n"
                "atexit.register(lambda: print('in a group:', ddp.dist.is_initialized()))\n" +
                sabotage("ddp.make_loaders", 1, "os.write(1, b'threads %d\\n' % torch.get_num_threads())") +
                sabotage(READ, 7, "if os.environ['RANK'] == '1': raise ValueError('sample 7 is bad')"))
        with tempfile.TemporaryDirectory() as folder:
            return finish(start(program(folder, text), *SMALL, OMP_NUM_THREADS=None))

    def test_a_rank_that_raises_ends_the_job_with_its_traceback_and_no_process_left(self):
        status, out, err = self.job_whose_rank_1_raises()
        self.assertEqual((status, err.count("Traceback")), (1, 1), err)
        self.assertRegex(err, r"(?s)^rank 1 failed:\nTraceback.*ValueError: sample 7 is bad\n\n?$")

    @unittest.skipUnless(torch.get_num_threads() > 1, "there is one core")
    def test_the_ranks_share_the_cores(self):
        status, out, err = self.job_whose_rank_1_raises()
        self.assertEqual(out.count(f"threads {torch.get_num_threads() // 2}\n"), 2, out)

    def test_a_rank_that_fails_does_not_wait_to_leave_its_group(self):
        text = ("import threading\n"
                "def broken(*args): raise ValueError('this one')\n"
                "ddp.make_loaders = broken\n"
                "ddp.dist.destroy_process_group = lambda: threading.Event().wait()\n")
        with tempfile.TemporaryDirectory() as folder:
            status, out, err = finish(start(program(folder, text), *SMALL))
        self.assertEqual(status, 1)
        self.assertIn("ValueError: this one", err)

    def test_a_rank_that_cannot_join_the_group_ends_the_job_with_one_traceback(self):
        status, out, err = finish(start(SCRIPT, *SMALL, GLOO_SOCKET_IFNAME="nowhere"))
        self.assertEqual((status, err.count("Traceback")), (1, 1), err)

    def test_on_a_terminal_a_progress_line_redraws_itself(self):
        class Terminal(io.StringIO):
            def isatty(self):
                return True
        with contextlib.redirect_stdout(Terminal()) as out:
            ddp.train(ddp.parse_args([*SMALL, "--parallel", "none", "--epochs", "1", "--log-interval", "2"]), CPU, 0, 1)
        lines = out.getvalue().split("\n")[1].split("\r\033[K")
        self.assertEqual([line.split(" | ")[0] for line in lines],
                         ["", "epoch 0 step 2/6", "epoch 0 step 4/6", "epoch 0 step 6/6", "epoch 0"])

    def test_a_rank_that_is_killed_ends_the_job_and_is_named(self):
        status, out, err = self.broken_job(
            "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)")
        self.assertEqual(status, 128 + signal.SIGKILL)
        self.assertRegex(err, r"rank 1 was ended by SIGKILL\n$")

    def broken_job(self, statement):
        with tempfile.TemporaryDirectory() as folder:
            return finish(start(program(folder, sabotage(READ, 7, statement)), *SMALL))

    def test_a_loss_that_is_not_finite_ends_the_job_with_epoch_and_step(self):
        status, out, err = finish(start(SCRIPT, *SMALL, "--lr", "1e30", "--parallel", "none"))
        self.assertEqual(status, 1)
        self.assertRegex(err, r"FloatingPointError: the loss is not finite in epoch 0, step 2\b")

    def test_a_running_job_listens_on_the_loopback_address_alone_and_ctrl_c_ends_it_quietly(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        process = start(SCRIPT, *SMALL, "--epochs", "1000000", "--num-workers", "1", MASTER_PORT=str(port))
        wait_for(process, "epoch 0")
        if sys.platform == "linux":
            addresses = self.listening(process.pid)
            self.assertIn(f"0100007F:{port:04X}", addresses)  # 127.0.0.1, as /proc/net/tcp writes it
            self.assertEqual({address.split(":")[0] for address in addresses}, {"0100007F"})
        os.killpg(process.pid, signal.SIGINT)
        status, out, err = finish(process)
        self.assertEqual((status, err), (130, ""))

    def listening(self, group):
        """The addresses on which the processes of a process group listen."""
        sockets = set()
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(folder.name)) == group:
                    sockets |= {os.readlink(fd) for fd in (folder / "fd").iterdir()}
        rows = [line.split() for table in ("tcp", "tcp6")
                for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]]
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


class ExactOnAnyNumberOfRanks(unittest.TestCase):
    OPTIONS = ["--num-samples", "44", "--length", "64", "--batch-size", "2", "--epochs", "2"]

    def assert_exact(self, world_size, stops, *more, net=None):
        options = [*self.OPTIONS, *more]
        expected = in_ranks(world_size, trained_job, options, None, net)[0]
        with tempfile.TemporaryDirectory() as folder:
            resumed = [*options, "--checkpoint-every", "1", "--checkpoint", f"{folder}/ck.pt"]
            outputs = [in_ranks(world_size, trained_job, resumed, stop_at, net)[0] for stop_at in (*stops, None)]
        self.assertIn("resuming from", outputs[-1])
        self.assertEqual(digest(outputs[-1]), digest(expected))
        lines = [line for output in outputs for line in epoch_lines(output)]
        self.assertEqual(list(dict.fromkeys(lines)), epoch_lines(expected))

    def test_a_resumed_job_on_2_ranks_is_the_undisturbed_one(self):
        self.assert_exact(2, (4, 6))

    def test_a_resumed_job_on_3_ranks_is_the_undisturbed_one(self):
        self.assert_exact(3, (3, 4, 5))

    def test_a_resumed_job_on_5_ranks_is_the_undisturbed_one(self):
        self.assert_exact(5, (4, 3))

    def test_a_resumed_job_on_3_ranks_that_accumulates_is_the_undisturbed_one(self):
        self.assert_exact(3, (3, 3), "--accumulate", "2")

    def test_a_resumed_net_with_dropout_on_3_ranks_is_the_undisturbed_one(self):
        self.assert_exact(3, (3, 8), net=DropoutNet)

    def test_dropout_masks_differ_between_ranks_and_steps(self):
        masks = sum(in_ranks(3, masks_of_dropout, self.OPTIONS), [])
        self.assertEqual(len(masks), 3 * 2 * 8)
        self.assertEqual(len(set(masks)), len(masks))

    def test_augmentation_differs_between_ranks_with_and_without_loader_workers(self):
        for num_workers in "0", "1":
            one, other = in_ranks(2, augmented_samples, num_workers)
            self.assertEqual(len(one), 3)
            self.assertFalse(set(one) & set(other))


class OneProcess(unittest.TestCase):
    def test_data_parallel_on_a_cpu_is_the_bare_net_and_says_so(self):
        dp, none = job(*SMALL, "--parallel", "dp"), undisturbed("--parallel", "none")
        self.assertIn("DataParallel needs GPUs", dp)
        self.assertEqual(epoch_lines(dp), epoch_lines(none))
        self.assertEqual(digest(dp), digest(none))

    def test_several_processes_are_refused(self):
        self.assertIn("is a single process", refusal(self, "--parallel", "dp", "--nproc-per-node", "2"))


def write_tar(path, members, form=tarfile.PAX_FORMAT):
    """A tar of (name, bytes) or (TarInfo, None) members."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
    return str(path)


def npy(array):
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


class TheShards(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = folder_of(cls)
        ddp.write_shards(cls.folder / "train", 22, 40, 0, shard_size=5)
        ddp.write_shards(cls.folder / "val", 7, 40, 1, shard_size=3)
        cls.shards = ddp.find_shards(str(cls.folder / "train" / "*.tar"))
        cls.options = ["--shards", str(cls.folder / "train" / "*.tar"),
                       "--val-shards", str(cls.folder / "val" / "{000000..000002}.tar")]

    def read(self, stream, num_workers=0):
        """The numbers of the samples that a stream gives, in order."""
        numbers = {tuple(x[0, :3].tolist()): i for i, (x, y) in enumerate(ddp.SyntheticDataset(22, 40))}
        loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
        return [numbers[tuple(x[0, :3].tolist())] for x, y in loader]

    def streams(self, num_replicas, samples_per_epoch=22, **options):
        return [ddp.ShardStream(self.shards, samples_per_epoch, num_replicas=num_replicas, rank=rank, **options)
                for rank in range(num_replicas)]

    def test_what_is_written_is_read_again(self):
        self.assertEqual(len(self.shards), 5)
        self.assertEqual(ddp.count_samples(self.shards), 22)
        samples = [(path, sample) for path in self.shards for sample in ddp.read_shard(path)]
        for i, (path, sample) in enumerate(samples):
            self.assertEqual(list(sample), ["__key__", "x.npy", "y.npy"])
            self.assertEqual(sample["__key__"], f"{i:06d}")
            for ours, original in zip(ddp.training_pair(path, sample), ddp.SyntheticDataset(22, 40)[i]):
                self.assertTrue(torch.equal(ours, original))

    def test_every_kind_of_member_is_decoded_skipped_or_left_as_bytes(self):
        folder, link, dotted = (tarfile.TarInfo(name) for name in ("a.dir", "a.link.txt", "."))
        folder.type = dotted.type = tarfile.DIRTYPE
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        late = tarfile.TarInfo("deep." + "d" * 150 + "/other.CLS")
        late.pax_headers = {"comment": "x" * 1000}
        late.mtime = 0.5  # written as a PAX header, as webdataset's are
        long = "f" * 120 + "/" + "k" * 120
        members = [(dotted, None), (folder, None), ("a.x.npy", npy(np.arange(3))), ("a.cls", b" 7\n"),
                   ("a.meta.json", b'{"b": [1]}'), (link, None), ("a.txt", "ä".encode()), ("a.jpg", b"\xff"),
                   ("README", b"no extension"), ("sub/a.cls", b"8"), (f"{long}.bin", b"z")]
        for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
            samples = list(ddp.read_shard(write_tar(self.folder / "kinds.tar", members, form)))
            array = samples[0].pop("x.npy")
            self.assertEqual(array.tolist(), [0, 1, 2])
            self.assertEqual(samples, [{"__key__": "a", "cls": 7, "meta.json": {"b": [1]}, "txt": "ä",
                                        "jpg": b"\xff"}, {"__key__": "sub/a", "cls": 8},
                                       {"__key__": long, "bin": b"z"}])
        path = write_tar(self.folder / "pax.tar", [(late, None)])
        with self.assertRaisesRegex(ValueError, "other.CLS"):  # an empty .cls: it is decoded as one
            list(ddp.read_shard(path))

    def test_a_tar_made_byte_by_byte_is_read(self):
        def block(name, size, kind):
            header = bytearray(512)
            header[0:len(name)] = name
            header[100:108], header[124:136] = b"0000644\0", b"%011o\0" % size
            header[156:157], header[257:265], header[148:156] = kind, b"ustar\x0000", b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            return bytes(header)
        record = b"27 path=folder/kk.second.x\n"
        path = self.folder / "bytes.tar"
        path.write_bytes(block(b"kk.first", 3, b"0") + b"abc".ljust(512, b"\0") +
                         block(b"PaxHeaders/x", len(record), b"x") + record.ljust(512, b"\0") +
                         block(b"ignored", 2, b"0") + b"de".ljust(512, b"\0") + bytes(1024))
        self.assertEqual(list(ddp.read_shard(str(path))), [{"__key__": "kk", "first": b"abc"},
                                                           {"__key__": "folder/kk", "second.x": b"de"}])

    def test_resampled_ranks_and_workers_read_equally_much_from_different_streams(self):
        for num_workers in (0, 2):
            ranks = [self.read(stream, num_workers) for stream in self.streams(3)]
            self.assertEqual([len(rank) for rank in ranks], [8, 8, 8])
            self.assertEqual([len(stream) for stream in self.streams(3)], [8, 8, 8])
            self.assertEqual(len({tuple(rank) for rank in ranks}), 3)
        workers = self.read(self.streams(1)[0], 2)
        self.assertNotEqual(workers[0::2], workers[1::2])

    def test_the_order_depends_on_seed_and_epoch_and_reaches_persistent_workers(self):
        stream, twin, other = self.streams(1)[0], self.streams(1)[0], self.streams(1, seed=1)[0]
        loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
        first = [x[0, 0].item() for x, y in loader]
        stream.set_epoch(1)
        second = [x[0, 0].item() for x, y in loader]
        stream.set_epoch(0)
        self.assertEqual([x[0, 0].item() for x, y in loader], first)
        self.assertNotEqual(first, second)
        self.assertEqual(self.read(twin), self.read(self.streams(1)[0]))
        self.assertNotEqual(self.read(twin), self.read(other))

    def test_without_resampling_each_sample_is_read_exactly_once(self):
        for num_replicas, num_workers in ((1, 0), (2, 0), (2, 2), (7, 0), (7, 1)):
            ranks = [self.read(stream, num_workers) for stream in self.streams(num_replicas, resampled=False)]
            self.assertEqual(sorted(itertools.chain(*ranks)), list(range(22)))
        stream = self.streams(1, resampled=False)[0]
        first = self.read(stream)
        stream.set_epoch(1)
        self.assertNotEqual(self.read(stream), first)

    def test_a_resumed_stream_draws_the_rest_of_the_epoch_from_elsewhere(self):
        stream = self.streams(2)[1]
        whole = self.read(stream)
        stream.set_epoch(0, start=10)
        self.assertEqual(len(stream), 6)
        self.assertEqual(len(self.read(stream)), 6)
        self.assertNotEqual(self.read(stream), whole[5:])

    def test_the_shuffle_buffer_keeps_every_sample_and_changes_the_order(self):
        for size in (1, 2, 10, 100):
            items = list(ddp.shuffled(range(50), size, np.random.default_rng(0)))
            self.assertEqual(sorted(items), list(range(50)))
            self.assertEqual(items == sorted(items), size == 1)
            self.assertTrue(all(i < at + size for at, i in enumerate(items)))

    def test_mixing_keeps_every_sample_and_fills_batches_from_several_workers(self):
        stream = self.streams(1)[0]
        loader = DataLoader(stream, 4, num_workers=2)
        mixed = ddp.Remix(loader, 4, 16)
        batches = [x[:, 0, 0].tolist() for x, y in mixed]
        self.assertEqual([len(batch) for batch in batches], [4, 4, 4, 4, 4, 2])
        self.assertEqual(len(mixed), 6)
        unmixed = [x[:, 0, 0].tolist() for x, y in loader]
        self.assertEqual(sorted(sum(batches, [])), sorted(sum(unmixed, [])))
        self.assertFalse({tuple(sorted(batch)) for batch in batches} <= {tuple(sorted(batch)) for batch in unmixed})
        self.assertEqual([len(x) for x, y in ddp.Remix(loader, 4, 16, drop_last=True)], [4] * 5)

    def test_two_ranks_train_on_shards_with_and_without_loader_workers_and_evaluate_all_of_them(self):
        (x, y), module = (torch.stack(part) for part in zip(*ddp.SyntheticDataset(7, 40, 1))), net(ddp.ConvNet)
        expected = ddp.evaluate(module, [(x, y)], CPU)
        stream = ddp.ShardStream(ddp.find_shards(self.options[3]), None, resampled=False, num_replicas=1, rank=0)
        for ours, theirs in zip(ddp.evaluate(module, DataLoader(stream, 3), CPU), expected):
            self.assertAlmostEqual(ours, theirs, places=6)
        jobs = [start(SCRIPT, *self.options, "--epochs", "3", "--num-workers", number) for number in ("0", "2")]
        for status, out, err in map(finish, jobs):
            self.assertEqual(status, 0, err)
            lines = out.splitlines()
            losses = [float(line.split()[4]) for line in lines[1:-1]]
            self.assertLess(losses[-1], losses[0])
            self.assertEqual(len(losses), 3)

    def test_a_stopped_job_on_shards_ends_its_epoch_with_the_right_number_of_samples(self):
        path = self.folder / "shards.pt"
        options = [*self.options, "--samples-per-epoch", "40", "--epochs", "1", "--log-interval", "1",
                   "--checkpoint", path, "--parallel", "none"]
        text = sabotage("ddp.total_over_ranks", 5, "os.kill(os.getpid(), signal.SIGTERM)")
        status, out, err = finish(start(program(self.folder, text), *options))
        self.assertEqual(status, 143, err)
        state = torch.load(path)
        self.assertEqual((state["samples"], state["sums"][2]), (24, 24 * 40))
        out = job(*options)
        self.assertIn("epoch 0, sample 24 of 40", out)
        self.assertIn("number of shards is 5, but here it is 3",
                      refusal(self, *map(str, options), "--shards", self.options[3]))

    def test_what_is_no_shard_is_refused_with_file_and_member(self):
        shard = pathlib.Path(self.shards[0]).read_bytes()
        x, y = npy(np.zeros((3, 5), np.float32)), npy(np.zeros(5, np.int64))
        evil = npy(np.array([{}], dtype=object))
        for content, message in (
                (b"", "bad.tar is no shard"), (b"PK not a tar" * 100, "bad.tar is no shard"), (bytes(1024), "no sample"),
                (shard[:300], "bad.tar is no shard"), (shard[:700], "bad.tar.*(000000.x.npy|unexpected end)"),
                (shard[:-10240], "bad.tar is no shard.*cut off|unexpected end"),
                (shard[:1536] + b"garbage!" * 64 + shard[2048:], "bad.tar is no shard"),
                ([("a.x.npy", x)], "bad.tar, sample a: no y.npy, only .'x.npy'."),
                ([("a.y.npy", y)], "bad.tar, sample a: no x.npy"),
                ([("a.x.npy", x[:-1]), ("a.y.npy", y)], "bad.tar, member a.x.npy"),
                ([("a.x.npy", evil), ("a.y.npy", y)], "bad.tar, member a.x.npy: Object arrays cannot be loaded"),
                ([("a.x.npy", b"?"), ("a.y.npy", y)], "bad.tar, member a.x.npy"),
                ([("a.x.npy", x.replace(b"(3, 5)", b"(3, 5(")), ("a.y.npy", y)], "bad.tar, member a.x.npy"),
                ([("a.meta.json", b"[" * 100_000)], "bad.tar, member a.meta.json"),
                ([("a.x.npy", y), ("a.y.npy", x)], r"x is int64 \(5,\), y is float32 \(3, 5\), but x must be")):
            path = self.folder / "bad.tar"
            path.write_bytes(content) if isinstance(content, bytes) else write_tar(path, content)
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                for sample in ddp.read_shard(str(path)):
                    ddp.training_pair(str(path), sample)
            self.assertRegex(refusal(self, "--shards", str(path), "--val-shards", str(path)), message)

    def test_a_sample_that_is_cut_off_is_not_given_out(self):
        path = pathlib.Path(write_tar(self.folder / "cut.tar", [("a.bin", b"x" * 2000), ("b.bin", b"y" * 2000)]))
        path.write_bytes(path.read_bytes()[:512 + 2048 + 512 + 1000])
        samples = ddp.read_shard(str(path))
        self.assertEqual(len(next(samples)["bin"]), 2000)
        with self.assertRaisesRegex(ValueError, "cut.tar is no shard, or not all of one"):
            next(samples)

    def test_patterns_name_shards_and_a_missing_one_is_refused(self):
        self.assertEqual(ddp.find_shards(str(self.folder / "train" / "{000000..000004}.tar")), self.shards)
        for pattern, missing in ((self.folder / "no" / "*.tar", "*.tar"),
                                 (self.folder / "train" / "{000003..000005}.tar", "000005.tar")):
            with self.assertRaisesRegex(ValueError, "there is no shard .*" + re.escape(missing)):
                ddp.find_shards(str(pattern))
        self.assertIn("go together", refusal(self, "--shards", "x"))

    def test_writing_shards_overwrites_nothing(self):
        before = sorted(self.folder.glob("train/*"))
        status, out, err = finish(start(SCRIPT, "write-shards", self.folder / "train"))
        self.assertEqual((status, out), (2, ""))
        self.assertRegex(err, r"^ddp_reference.py: .*train is not empty\n$")
        self.assertEqual(sorted(self.folder.glob("train/*")), before)


class TheCases(unittest.TestCase):
    def shown(self, *options):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ddp.cases(options)
        return out.getvalue()

    def test_the_nine_cases_show_the_golden_batches(self):
        blocks = self.shown().strip().split("\n\n")
        self.assertEqual(len(blocks), len(GOLDEN))
        for block, (case, n, *_, epochs) in zip(blocks, GOLDEN):
            self.assertRegex(block, rf"^case {case}: .*\n{n} samples, 2 ranks, batches of 4\n")
            for epoch, rank in itertools.product(range(2), range(2)):
                row = re.search(rf"epoch {epoch}  rank {rank} (.*)", block)[1]
                self.assertEqual([[int(i) for i in batch.split(", ")] for batch in re.findall(r"\[(.*?)\]", row)],
                                 epochs[epoch][rank])

    def test_repeated_samples_are_marked_and_unread_ones_named(self):
        rows = self.shown("--num-samples", "10", "--num-replicas", "3").splitlines()
        self.assertEqual([row.count("*") for row in rows[2:8]], [0, 1, 1] * 2)
        unread = self.shown("--num-samples", "10", "--num-replicas", "3", "--drop-last", "--no-set-epoch")
        self.assertEqual(re.findall("read by no rank: (.*)", unread), ["2", "2"])
        self.assertNotIn("*", self.shown("--num-samples", "10", "--num-replicas", "3", "--no-pad"))
        self.assertEqual(self.shown("--num-samples", "4", "--batch-size", "3").count("] short"), 4)

    def test_piped_it_is_plain_text(self):
        self.assertNotIn("\033", self.shown())


class TheCommandLine(unittest.TestCase):
    def test_a_number_out_of_range_is_refused_with_the_range(self):
        for option, bad in {"--epochs": "0 -1 x 1.5", "--batch-size": "0 -4", "--num-samples": "0",
                            "--length": "0 1 100000000000000", "--lr": "0 -1 nan inf x", "--nproc-per-node": "0 100000",
                            "--num-workers": "-1", "--accumulate": "0", "--seed": "-1 4294967296",
                            "--log-interval": "0"}.items():
            for value in bad.split():
                with self.subTest(option=option, value=value):
                    self.assertRegex(refusal(self, f"{option}={value}"), rf"argument {option}: '{value}' is not")

    def test_an_unknown_backend_or_option_is_refused(self):
        self.assertIn("invalid choice: 'mpi'", refusal(self, "--backend", "mpi"))
        self.assertIn("unrecognized arguments: --wat", refusal(self, "--wat"))

    def test_nccl_without_a_gpu_for_each_process_is_refused_with_the_remedy(self):
        self.assertIn("use --backend gloo", refusal(self, "--backend", "nccl", "--nproc-per-node", str(GPUS + 1)))

    @unittest.skipIf(GPUS, "this machine has GPUs")
    def test_sync_bn_without_gpus_is_refused(self):
        self.assertIn("--sync-bn needs GPUs", refusal(self, "--sync-bn"))

    def test_drop_last_that_leaves_nothing_is_refused(self):
        options = "--drop-last", "--num-samples=11", "--nproc-per-node=3", "--backend=gloo"
        self.assertIn("leaves nothing to train on", refusal(self, *options, "--batch-size=4"))
        self.assertEqual(ddp.parse_args([*options, "--batch-size=3"]).batch_size, 3)

    def test_a_launchers_environment_that_is_not_whole_is_refused(self):
        with unittest.mock.patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2"):
            self.assertIn("is missing or no number", refusal(self))
            with unittest.mock.patch.dict(os.environ, MASTER_ADDR="x", MASTER_PORT="1", WORLD_SIZE="y"):
                self.assertIn("is missing or no number", refusal(self))

    def test_a_refusal_is_one_line_on_stderr_status_2_and_no_traceback(self):
        status, out, err = finish(start(SCRIPT, MASTER_ADDR="192.0.2.1", MASTER_PORT="1"))
        self.assertEqual((status, out, err.count("\n")), (2, "", 1), err)


@unittest.skipUnless(GPUS, "needs a GPU")
class OnGPUs(unittest.TestCase):
    VISIBLE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))}

    def test_the_main_job_runs_on_nccl_with_one_process_per_gpu(self):
        output = job(**self.VISIBLE)
        self.assertTrue(output.startswith(f"nccl, world size {GPUS}, cuda, "), output)

    def test_one_process_on_nccl_learns_also_with_amp_sync_bn_and_loader_workers(self):
        for options in ([], ["--amp"], ["--sync-bn"], ["--num-workers", "2"], ["--accumulate", "2"]):
            lines = job("--nproc-per-node", "1", *options, **self.VISIBLE).splitlines()
            self.assertGreater(float(lines[-2].split()[11]), 0.8, lines)

    def test_two_gloo_processes_share_a_gpu(self):
        output = job("--nproc-per-node", "2", "--backend", "gloo", CUDA_VISIBLE_DEVICES="0")
        self.assertTrue(output.startswith("gloo, world size 2, cuda, "), output)

    @unittest.skipUnless(GPUS > 1, "needs two GPUs")
    def test_each_rank_has_a_gpu_of_its_own(self):
        output = job("--nproc-per-node", "2", *SMALL, **self.VISIBLE)
        self.assertTrue(output.startswith("nccl, world size 2, cuda, "), output)


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`."""
    program = unittest.main(exit=False, verbosity=2, argv=[sys.argv[0], *sys.argv[1:]])
    result = program.result
    bad = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    failed, skipped = len(bad) + len(result.unexpectedSuccesses), len(result.skipped)
    sys.stderr.flush()
    print(f"{max(0, result.testsRun - failed - skipped)} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
