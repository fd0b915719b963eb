"""The guarantees of ddp_reference.py, in its order: the names of the tests are the list.

    bash run.sh test                             # all of them; also: python -m pytest test_ddp_reference.py
    python test_ddp_reference.py -k sampler      # those with "sampler" in their name

The oracles: torch's own sampler, a single process on the whole batch, a job that was not interrupted.
"""

import ast, contextlib, copy, datetime, functools, io, itertools, os, pathlib, re, shutil, signal, socket, subprocess
import sys, tarfile, tempfile, traceback, unittest, unittest.mock, warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import ddp_reference as ddp

CPU = torch.device("cpu")
GPUS = torch.cuda.device_count()
HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE / "ddp_reference.py"
TORCHRUN = ["-m", "torch.distributed.run"]
SMALL = ["--num-samples", "44", "--length", "64", "--batch-size", "2", "--epochs", "2"]

# What two real NCCL ranks printed with torch's sampler (seed 0, batches of 4, two epochs), by case: samples, with
# a sampler, set_epoch called, the loader's drop_last, [epoch][rank] batches.
GOLDEN = {
    "1": (8, False, False, True, [[[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]]] * 2),
    "2": (8, True, False, True, [[[[4, 7, 2, 1]], [[0, 3, 5, 6]]]] * 2),
    "3": (8, True, True, True, [[[[4, 7, 2, 1]], [[0, 3, 5, 6]]], [[[5, 2, 7, 1]], [[4, 6, 3, 0]]]]),
    "4": (6, True, False, False, [[[[2, 3, 1]], [[5, 0, 4]]]] * 2),
    "4, dropping the short batch": (6, True, False, True, [[[], []]] * 2),
    "5": (5, True, False, False, [[[[4, 1, 2]], [[0, 3, 4]]]] * 2),
    "5, with set_epoch": (5, True, True, False, [[[[4, 1, 2]], [[0, 3, 4]]], [[[0, 2, 1]], [[4, 3, 0]]]]),
    "6": (10, True, False, False, [[[[4, 7, 3, 0], [6]], [[1, 5, 9, 8], [2]]]] * 2),
    "7": (10, True, False, True, [[[[4, 7, 3, 0]], [[1, 5, 9, 8]]]] * 2),
}


class Ranks:
    """Processes that are started once and form a new gloo group for each call."""

    processes = []

    @classmethod
    def run(cls, world_size, function, *args, **options):
        """[function(rank, *args, **options) of each rank]."""
        context = mp.get_context("spawn")
        while len(cls.processes) < world_size:
            ours, theirs = context.Pipe()
            cls.processes.append((context.Process(target=cls.serve, args=(theirs,)), ours))
            cls.processes[-1][0].start()
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(cls.processes[:world_size]):
                pipe.send((dict(rank=rank, world_size=world_size), f"{folder}/store", function, args, options))
            answers = [pipe.recv() for _, pipe in cls.processes[:world_size]]
        if failed := [answer for answer in answers if isinstance(answer, str)]:
            raise AssertionError(failed[0])
        return [answer[0] for answer in answers]

    @staticmethod
    def serve(pipe):
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                place, path, function, args, options = pipe.recv()
                store = dist.FileStore(path, place["world_size"])
                dist.init_process_group("gloo", store=store, timeout=datetime.timedelta(seconds=60), **place)
                try:
                    answer = (function(place["rank"], *args, **options),)
                    dist.barrier()
                except Exception:
                    answer = traceback.format_exc()
                pipe.send(answer)
                dist.destroy_process_group()


def tearDownModule():
    for _, pipe in Ranks.processes:
        pipe.close()
    for process, _ in Ranks.processes:
        process.join()


def start(*command, **extra):
    """Start a Python program in a process group of its own, with one thread a rank, without a GPU or a launcher's
    environment; its output comes through pipes."""
    unwanted = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES"}
    wanted = {name: value for name, value in os.environ.items() if name not in unwanted}
    wanted |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
               "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"} | extra
    return subprocess.Popen([sys.executable, *map(str, command)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True,
                            env={name: value for name, value in wanted.items() if value is not None})


def finish(process):
    """(status, stdout, stderr) once every process that holds the output has ended."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def read_until(process, beginning):
    """The output of a process up to the line that begins so."""
    lines = [process.stdout.readline()]
    while lines[-1] and not lines[-1].startswith(beginning):
        lines.append(process.stdout.readline())
    return "".join(lines)


def job(*command, **extra):
    """The output of a program that must succeed."""
    status, out, err = finish(start(*command, **extra))
    assert not status, f"status {status}\n{out}\n{err}"
    return out


def with_fault(fault, *options, launcher=(), **extra):
    """Start a job in each of whose processes a function of this file is called first."""
    return start(*launcher, __file__, *options, FAULT=fault.__name__, **extra)


def before_call(owner, name, do, nth=1, rank=None):
    """Have do() called before the nth call of owner.name; returns what takes it back."""
    original, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(original)
    def replaced(*args, **kwargs):
        if rank in (None, dist.is_initialized() and dist.get_rank()) and next(calls) == nth:
            do()
        return original(*args, **kwargs)
    setattr(owner, name, replaced)
    return lambda: setattr(owner, name, original)


class Stop(Exception):
    """Raised in all ranks of a job in place of a kill."""


def stop(*args):
    raise Stop(*args)


def fail(message="this one"):
    raise ValueError(message)


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


def rank_1_raises_and_nobody_can_leave():
    before_call(ddp, "make_loader", lambda: os.write(
        1, f"threads {torch.get_num_threads()} interface {os.environ['GLOO_SOCKET_IFNAME']}\n".encode()))
    before_call(torch.optim.Adam, "step", fail, nth=3, rank=1)
    dist.destroy_process_group = signal.pause


def rank_1_is_killed():
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        before_call(torch.optim.Adam, "step", kill_this_process, nth=3, rank=1)


def trained(rank, options, task=None, stop_at=None, terminal=False, seconds_a_look=None):
    """What a job in this process, one of a group, says and does.

    task: in place of make_task. stop_at: end before that step. terminal: whether stdout is one.
    seconds_a_look: by how much the clock goes on each time the job looks at it.
    """
    result, out, patch = dict(read=[], sums=[], saved=[], random=[]), io.StringIO(), unittest.mock.patch.object
    out.isatty = lambda: terminal

    def note(owner, name, look, function=None):
        """Have what a function was given, and gives back, looked at."""
        def noting(*args, **kwargs):
            value = (function or original)(*args, **kwargs)
            look(value, *args)
            return value
        original = getattr(owner, name)
        stack.enter_context(patch(owner, name, noting))
    with contextlib.ExitStack() as stack:
        note(ddp.SyntheticDataset, "__getitem__", lambda _, data, i: result["read"].append((data.seed, i)))
        note(ddp, "batch_sums", lambda value, *_: result["sums"].append(value))
        note(ddp, "save_checkpoint", lambda _, path, state: result["saved"].append((state["epoch"], state["samples"])))
        note(F, "dropout", lambda out, x, p, training, *_: training and result["random"].append(
            torch.get_rng_state().numpy().tobytes()))
        note(ddp, "make_task", lambda made, _: result.update(first_digest=ddp.digest(made[2]), module=made[2]), task)
        note(ddp, "resume", lambda _, path, job, module, optimizer, device: result.update(
            lr=optimizer.param_groups[0]["lr"], steps=[state["step"].clone() for state in optimizer.state.values()]))
        if seconds_a_look:
            stack.enter_context(patch(ddp.time, "perf_counter", itertools.count(0, seconds_a_look).__next__))
        if stop_at:
            stack.callback(before_call(torch.optim.Adam, "step", stop, stop_at))
            stack.enter_context(contextlib.suppress(Stop))
        args = ddp.make_parser().parse_args(["--backend", "gloo", "--num-samples", "100",
                                                 *(str(option).replace("RANK", str(rank)) for option in options)])
        ddp.check_job(args, fail)
        stack.enter_context(contextlib.redirect_stdout(out))
        ddp.train(args, CPU)
    return result | dict(out=out.getvalue(), digest=ddp.digest(result.pop("module")))


def failing(rank, options, **how):
    """The message of the error with which a job in this process ends, and its kind."""
    try:
        trained(rank, options, **how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def images(args, channels=4, num_samples=40):
    """Images with one label each, a plain int; a net with Conv2d, Dropout and Linear."""
    x = torch.randn(50, 1, 8, 8, generator=torch.Generator().manual_seed(args.seed))
    data = [(image, int(image[0, :4].sum() > image[0, 4:].sum())) for image in x]
    return data[:num_samples], data[40:], nn.Sequential(
        nn.Conv2d(1, channels, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(36 * channels, 2))


class RandomCrops(torch.utils.data.Dataset):
    """Samples that are drawn from PyTorch's generator, as augmentation does."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.rand(()).expand(3, 8), torch.zeros(8, dtype=torch.int64)


def random_crops(args):
    return RandomCrops(), ddp.SyntheticDataset(4, 8), ddp.ConvNet()


class FrozenNorm(ddp.ConvNet):
    """The net with BatchNorm in eval mode: in training it normalises by the batch it sees, and a rank, or a
    micro-batch, sees another one than a single process on the whole batch."""

    def train(self, mode=True):
        return super().train(False)


def net(kind=FrozenNorm):
    torch.manual_seed(0)
    return kind()


def whole_batch(num_samples):
    return [torch.stack(part) for part in zip(*ddp.SyntheticDataset(num_samples, 40))]


def epoch_lines(*outputs):
    """The different lines of epochs without their speed, which is never the same twice."""
    lines = re.findall(r"^epoch \d+ \| .* \|(?= \d)", "".join(outputs), re.MULTILINE)
    return list(dict.fromkeys(lines))


def digest(output):
    return re.fullmatch(r"parameters sha256 ([0-9a-f]{64})", output.splitlines()[-1])[1]


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


def refusal(*options, **environ):
    """The one line with which a command line is refused, before any process is started."""
    with contextlib.redirect_stderr(io.StringIO()) as err, unittest.mock.patch.dict(os.environ, environ), \
            unittest.mock.patch.object(ddp, "launch", fail), contextlib.suppress(SystemExit):
        ddp.main([*map(str, options)])
    assert err.getvalue().count("\n") == 1, err.getvalue()
    return err.getvalue()


class Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)


class TheTask(Test):
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
        self.assertEqual((x.dtype, x.shape, y.dtype, y.shape), (torch.float32, (3, 10000), torch.int64, (10000,)))
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

    def test_the_pieces_to_copy_work_without_the_rest_of_the_file(self):
        names = {"DistributedSampler", "SyntheticDataset", "ConvNet", "save_checkpoint", "digest"}
        tree = ast.parse(SCRIPT.read_text())
        tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))
                     or getattr(node, "name", None) in names]
        pieces = {}
        exec(compile(tree, "pieces", "exec"), pieces)
        data = pieces["SyntheticDataset"](5, 20)
        self.assertEqual(list(pieces["DistributedSampler"](data, 2, 1)), list(TorchSampler(data, 2, 1)))
        module = net(pieces["ConvNet"])
        self.assertEqual(pieces["digest"](module), ddp.digest(net(ddp.ConvNet)))
        pieces["save_checkpoint"](self.folder / "piece.pt", module.state_dict())
        torch.testing.assert_close(torch.load(self.folder / "piece.pt"), module.state_dict())

    def test_every_collective_call_is_marked(self):
        collective = re.compile(r"dist\.(all_|broadcast|barrier|reduce|gather|init_process|destroy_process)|no_sync\(\)"
                                r"|\.backward\(\)| model\(x\)|Parallel\(module, |convert_sync")
        lines = [line for line in SCRIPT.read_text().splitlines() if collective.search(line)]
        self.assertEqual(len(lines), 10)
        self.assertEqual([line for line in lines if "# DDP" not in line], [])

    def test_the_readme_names_these_lines_and_the_tests_as_they_are(self):
        readme, names = (HERE / "README.md").read_text(), pathlib.Path(__file__).read_text()
        for number, line in enumerate(SCRIPT.read_text().splitlines(), 1):
            if "  # DDP" in line:
                self.assertIn(f"\n{number}: {line.strip()}\n", readme)
        tests = re.findall(r"^\|.*\| `(\w+)` \|[^|]*\|$", readme, re.MULTILINE)
        self.assertGreater(len(tests), 20)
        self.assertEqual([test for test in tests if f"def test_{test}" not in names], [])

    def test_a_task_of_ones_own_resumes_exactly_on_3_ranks(self):
        path, options = self.folder / "images.pt", ["--batch-size", 2, "--epochs", 2]
        expected = Ranks.run(3, trained, options, task=images)[0]["digest"]
        options += ["--checkpoint", path, "--checkpoint-every", 1]
        Ranks.run(3, trained, options, task=images, stop_at=10)
        for task, difference in ((functools.partial(images, channels=5), r"its 0.weight is \[4, 1, 3, 3\], but here"),
                                 (functools.partial(images, num_samples=39), "its samples is 40, but here it is 39")):
            self.assertRegex(Ranks.run(3, failing, options, task=task)[2], difference)
        result = Ranks.run(3, trained, options, task=images)[0]
        self.assertIn("epoch 1, sample 12 of 40", result["out"])
        self.assertEqual(result["digest"], expected)

    def test_the_script_of_the_readme_trains_its_own_task_under_spawn_and_torchrun(self):
        script = self.folder / "my_job.py"
        script.write_text(re.search(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)[1])
        options = ["--batch-size", 10, "--epochs", 3]
        expected = job(*TORCHRUN, "--standalone", "--nproc-per-node=3", script, *options)
        options += ["--nproc-per-node", 3, "--checkpoint", self.folder / "mine.pt", "--checkpoint-every", 1]
        process = start(script, *options)
        before = read_until(process, "epoch 0 |")
        while (saved := torch.load(self.folder / "mine.pt"))["epoch"] == 0 or saved["samples"] < 300:
            pass
        process.kill()  # the ranks are to end with it
        finish(process)
        after = job(script, *options)
        self.assertRegex(after, "resuming from .*: epoch 1, sample [1-9][0-9]* of 1500")
        self.assertEqual(epoch_lines(before, after), epoch_lines(expected))
        self.assertEqual(digest(after), digest(expected))


class TheSampler(Test):
    def assert_like_torch(self, n, num_replicas, shuffle, drop_last, seed, epochs):
        for rank in range(num_replicas):
            ours, torchs = (sampler(range(n), num_replicas, rank, shuffle, seed, drop_last)
                            for sampler in (ddp.DistributedSampler, TorchSampler))
            for epoch in epochs:
                ours.set_epoch(epoch)
                torchs.set_epoch(epoch)
                self.assertEqual((list(ours), len(ours)), (list(torchs), len(torchs)))
            for name in "dataset num_replicas rank epoch drop_last shuffle seed num_samples total_size".split():
                self.assertEqual(getattr(ours, name), getattr(torchs, name), name)

    def test_it_gives_the_indices_of_torchs_sampler_for_every_small_case(self):
        for case in itertools.product(range(20), range(1, 8), (True, False), (True, False), (0, 7), ((0, 5),)):
            with self.subTest(case):
                self.assert_like_torch(*case)

    def test_it_gives_the_indices_of_torchs_sampler_for_large_datasets(self):
        for n, num_replicas, shuffle, drop_last in itertools.product(
                (8191, 8192, 8193, 100_003), (1, 7), (True, False), (True, False)):
            self.assert_like_torch(n, num_replicas, shuffle, drop_last, 3, (2,))

    def test_the_int32_permutation_it_uses_is_the_int64_permutation_torch_uses(self):
        for n in (0, 1, 2, 1000, 20_000, 100_000, 3_000_000):
            small, large = (torch.randperm(n, generator=torch.Generator().manual_seed(n), dtype=dtype)
                            for dtype in (torch.int32, torch.int64))
            self.assertTrue(torch.equal(small, large))

    def test_drop_last_drops_also_where_it_would_not_pad(self):
        self.assertEqual([len(rank) for rank in indices(10, num_replicas=4, drop_last=True, pad=False)], [2] * 4)

    def test_after_any_start_any_number_of_ranks_reads_the_rest_once(self):
        for n, start, num_replicas in itertools.product((0, 1, 7, 24), range(25), range(1, 7)):
            if start <= n:
                order = indices(n, epoch=3, num_replicas=1)[0]
                rest = indices(n, epoch=3, start=start, num_replicas=num_replicas, pad=False)
                self.assertEqual(dealt(rest), order[start:])
                self.assertLessEqual(max(map(len, rest)) - min(map(len, rest)), 1)
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

    def test_a_second_pass_without_set_epoch_warns_and_names_the_remedy(self):
        sampler, unshuffled = (ddp.DistributedSampler(range(5), 2, 0, shuffle=shuffle) for shuffle in (True, False))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for epoch in range(3):
                sampler.set_epoch(epoch)
                list(sampler), list(unshuffled)
            self.assertEqual(caught, [])
            list(sampler), list(sampler)
        self.assertEqual(len(caught), 1)
        self.assertIn("call set_epoch(epoch)", str(caught[0].message))

    def test_it_takes_four_bytes_a_sample_for_a_moment_and_then_its_own_part(self):
        sizes = []

        class Storages(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor) and result._base is None:
                    sizes.append(result.untyped_storage().nbytes())
                return result
        with Storages():
            iterator = iter(ddp.DistributedSampler(range(100_000), 8, 3))
        self.assertEqual((max(sizes), sizes[-1], type(next(iterator))), (400_000, 50_000, int))

    def test_its_memory_does_not_grow_without_shuffling(self):
        iterator = iter(ddp.DistributedSampler(range(2**50), 2**20, 5, shuffle=False))
        self.assertEqual([next(iterator), next(iterator)], [5, 5 + 2**20])

    def test_from_2_to_the_31_samples_on_its_permutation_is_int64(self):
        class Dtype(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if "randperm" in str(function):
                    raise Stop(kwargs.get("dtype", torch.int64))
                return function(*args, **(kwargs or {}))
        for n, dtype in ((2**31 - 1, torch.int32), (2**31, torch.int64)):
            with self.assertRaises(Stop) as seen, Dtype():
                iter(ddp.DistributedSampler(range(n), 8, 3))
            self.assertEqual(seen.exception.args, (dtype,))

    def test_a_number_out_of_range_is_a_value_error_that_says_the_range(self):
        for arguments, message in (((2, 2), r"rank is 2, but must be in .* \[0, 2\)"), ((2, -1), "rank is -1"),
                                   ((0, 0), r"rank is 0, but must be in .* \[0, 0\)")):
            with self.assertRaisesRegex(ValueError, message):
                ddp.DistributedSampler(range(5), *arguments)
        for start in (-1, 6):
            with self.assertRaisesRegex(ValueError, rf"start is {start}, but must be in \[0, 5\]"):
                ddp.DistributedSampler(range(5), 2, 0).set_epoch(0, start)

    def test_a_dataset_without_a_length_is_a_type_error(self):
        with self.assertRaisesRegex(TypeError, "has no len"):
            ddp.DistributedSampler((i for i in range(5)), 2, 0)


def stepped(model, loader, **options):
    """What train_steps makes of a model, with SGD: (state, samples read at each step, sums)."""
    sums = torch.zeros(3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = list(ddp.train_steps(model, loader, optimizer, CPU, sums, **options))
    return getattr(model, "module", model).state_dict(), samples, sums


def accumulated(rank):
    """stepped(), by two micro-batches of one sample a rank, and how often gradients were exchanged."""
    data, buckets = ddp.SyntheticDataset(8, 40), []

    def counted(group, bucket):
        buckets.append(bucket)
        return allreduce_hook(group, bucket)
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    model.register_comm_hook(None, counted)
    return *stepped(model, DataLoader(data, 1, sampler=ddp.DistributedSampler(data)), accumulate=2), len(buckets)


def evaluated(rank, num_samples):
    data = ddp.SyntheticDataset(num_samples, 40)
    sampler = ddp.DistributedSampler(data, shuffle=False, pad=False)
    return ddp.evaluate(DistributedDataParallel(net(ddp.ConvNet)), DataLoader(data, 4, sampler=sampler), CPU)


class TheStep(Test):
    def test_accumulating_on_two_ranks_equals_one_step_of_one_process_on_all_their_batches(self):
        data = ddp.SyntheticDataset(8, 40)
        state, _, sums = stepped(net(), DataLoader(data, 4, sampler=ddp.DistributedSampler(data, 1, 0)))
        ranks = Ranks.run(2, accumulated)
        for rank in ranks:
            torch.testing.assert_close(rank[0], state)
        torch.testing.assert_close(ranks[0][2] + ranks[1][2], sums, rtol=1e-6, atol=0)

    def test_ranks_exchange_gradients_only_with_the_last_micro_batch_of_a_step(self):
        self.assertEqual(Ranks.run(2, accumulated)[0][3], 2)  # one bucket, two steps of two micro-batches

    def test_the_last_shorter_step_is_by_the_mean_of_its_own_micro_batches(self):
        data = ddp.SyntheticDataset(5, 40)
        state, samples, _ = stepped(net(), DataLoader(data, 1), accumulate=2)
        self.assertEqual(samples, [0, 2, 4, 5])
        expected, *_ = stepped(net(), DataLoader(data, batch_sampler=[[0, 1], [2, 3], [4]]))
        torch.testing.assert_close(state, expected)

    def test_one_label_a_sample_is_counted_like_one_a_position(self):
        module, (x, y) = nn.Sequential(net(), nn.AdaptiveAvgPool1d(1), nn.Flatten()), whole_batch(6)
        logits = copy.deepcopy(module).eval()(x)
        *_, sums = stepped(module, [(x, y[:, 0])])
        expected = F.cross_entropy(logits, y[:, 0], reduction="sum").item(), (logits.argmax(1) == y[:, 0]).sum(), 6
        torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)

    def test_amp_runs_the_net_in_bfloat16_and_keeps_float32_parameters(self):
        seen, module = [], net(ddp.ConvNet)
        module.conv2.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
        stepped(module, DataLoader(ddp.SyntheticDataset(2, 40)), amp=True)
        self.assertEqual(set(seen), {torch.bfloat16})
        self.assertEqual({parameter.dtype for parameter in module.parameters()}, {torch.float32})

    def test_the_steps_synchronise_with_the_device_nowhere(self):
        # .item(), .tolist(), bool() and the like all call this operator.
        class NoSynchronisation(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                assert function is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
                return function(*args, **(kwargs or {}))
        module, batch = net(), whole_batch(1)
        with NoSynchronisation():
            stepped(module, [batch] * 3, accumulate=2)
            with self.assertRaises(AssertionError):
                torch.zeros(1).item()

    def test_evaluation_gives_the_numbers_of_a_plain_loop_on_1_2_and_3_ranks(self):
        module, losses, correct = net(ddp.ConvNet).eval(), [], []
        with torch.no_grad():
            for x, y in ddp.SyntheticDataset(25, 40):
                logits = module(x[None])
                losses.append(F.cross_entropy(logits, y[None]).item())
                correct.append((logits.argmax(1) == y).double().mean().item())
        for loss, accuracy in sum((Ranks.run(world_size, evaluated, 25) for world_size in (1, 2, 3)), []):
            self.assertAlmostEqual(loss, sum(losses) / 25, places=6)
            self.assertAlmostEqual(accuracy, sum(correct) / 25, places=6)

    def test_a_rank_without_a_sample_takes_part_in_the_evaluation(self):
        single = Ranks.run(1, evaluated, 1)[0]
        for rank in Ranks.run(2, evaluated, 1):
            for ours, expected in zip(rank, single):
                self.assertAlmostEqual(ours, expected, places=6)

    def test_the_digest_covers_parameters_and_buffers(self):
        module = net(ddp.ConvNet)
        digests = {ddp.digest(module)}
        for tensor in (module.conv3.bias.data, module.bn1.running_var, module.bn2.num_batches_tracked):
            tensor += 1
            digests.add(ddp.digest(module))
        self.assertEqual(len(digests), 4)


def save_and_be_killed(before, nth, path, state):
    """Save a checkpoint in a process that is killed before the nth call of a function of os."""
    process = os.fork()
    if not process:
        before_call(os, before, kill_this_process, nth)
        ddp.save_checkpoint(path, state)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL


class TheCheckpoint(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.path, cls.options = cls.folder / "first.pt", [*SMALL, "--checkpoint-every", 1, "--checkpoint"]
        Ranks.run(2, trained, [*cls.options, cls.path], stop_at=3)  # after 8 of 44 samples

    def copy(self, name):
        return pathlib.Path(shutil.copy(self.path, self.folder / name))

    def resumed(self, path, *more, world_size=2, **how):
        return Ranks.run(world_size, trained, [*self.options, path, *more], **how)

    def refused(self, path, *more):
        """The line with which a job refuses a checkpoint."""
        messages = Ranks.run(2, failing, [*self.options, path, *more])
        self.assertEqual(messages[0], messages[1])
        self.assertRegex(messages[0], "^InputError: .*")
        return messages[0]

    def assert_exact(self, world_size, stops, *more, task=None):
        """A job that is stopped before these steps, each time resumed, ends as one that is not."""
        expected = Ranks.run(world_size, trained, [*SMALL, *more], task=task)[0]
        path = self.folder / "exact.pt"
        path.unlink(missing_ok=True)
        outputs = [self.resumed(path, *more, world_size=world_size, task=task, stop_at=stop_at)[0]["out"]
                   for stop_at in (*stops, None)]
        self.assertEqual(len(re.findall("resuming from", "".join(outputs))), len(stops))
        self.assertEqual(digest(outputs[-1]), expected["digest"])
        self.assertEqual(epoch_lines(*outputs), epoch_lines(expected["out"]))

    def test_a_resumed_job_on_2_ranks_is_the_uninterrupted_one(self):
        self.assert_exact(2, (4, 12))

    def test_a_resumed_job_on_3_ranks_is_the_uninterrupted_one(self):
        self.assert_exact(3, (3, 4, 5))

    def test_a_resumed_job_on_5_ranks_is_the_uninterrupted_one(self):
        self.assert_exact(5, (4, 3))

    def test_a_resumed_job_on_3_ranks_that_accumulates_is_the_uninterrupted_one(self):
        self.assert_exact(3, (3, 4), "--accumulate", 2)

    def test_a_resumed_job_on_3_ranks_with_loader_workers_is_the_uninterrupted_one(self):
        self.assert_exact(3, (3,), "--num-workers", 1, "--epochs", 1)

    def test_a_resumed_net_with_dropout_on_3_ranks_is_the_uninterrupted_one(self):
        self.assert_exact(3, (3, 5), task=images)

    def test_a_resumed_job_that_draws_augmentation_in_its_ranks_is_the_uninterrupted_one(self):
        self.assert_exact(3, (3,), "--epochs", 1, task=random_crops)

    def test_a_finished_job_is_not_trained_again(self):
        path = self.copy("finished.pt")
        before = self.resumed(path)[0]["digest"]
        content = path.read_bytes()
        self.assertEqual(self.resumed(path)[0]["digest"], before)
        self.assertEqual(path.read_bytes(), content)

    def test_another_number_of_ranks_reads_the_rest_of_the_epoch_and_nothing_twice(self):
        for world_size in (1, 3):
            ranks = self.resumed(self.copy(f"elastic{world_size}.pt"), world_size=world_size)
            self.assertIn("epoch 0, sample 8 of 44", ranks[0]["out"])
            rest, new = (indices(44, *place, num_replicas=world_size) for place in ((0, 8), (1, 0)))
            for rank, *expected in zip(ranks, rest, new):
                read = [i for seed, i in rank["read"] if seed == 0]
                self.assertEqual(read, [0] + sum(expected, []))  # sample 0 settles the layout of the buckets

    def test_rank_0_alone_writes(self):
        ranks = Ranks.run(2, trained, [*SMALL, "--checkpoint", self.folder / "both.pt"])
        self.assertEqual([rank["saved"] for rank in ranks], [[(1, 0), (2, 0)], []])

    def test_ranks_that_find_different_checkpoints_do_not_train(self):
        self.copy("of-rank-0.pt")
        for message in Ranks.run(2, failing, [*SMALL, "--checkpoint", self.folder / "of-rank-RANK.pt"]):
            self.assertRegex(message, "^InputError: the ranks find different checkpoints")

    def test_a_kill_at_any_moment_of_writing_leaves_the_old_checkpoint_or_the_new_one(self):
        path = self.folder / "written.pt"
        flushing, renaming, flushing_the_folder = ("fsync", 1), ("replace", 1), ("fsync", 2)
        for moment, left in ((flushing, "old"), (renaming, "old"), (flushing_the_folder, "new")):
            ddp.save_checkpoint(path, {"state": "old"})
            save_and_be_killed(*moment, path, {"state": "new"})
            self.assertEqual(torch.load(path, weights_only=True), {"state": left})

    def test_what_a_kill_leaves_behind_is_written_over(self):
        path = self.folder / "over.pt"
        save_and_be_killed("replace", 1, path, {"state": torch.zeros(9999)})
        self.assertEqual([file.name for file in self.folder.glob("*over.pt*")], [".over.pt.new"])
        ddp.save_checkpoint(path, {"state": "new"})
        self.assertEqual([file.name for file in self.folder.glob("*over.pt*")], ["over.pt"])

    def test_a_write_that_fails_leaves_the_old_checkpoint(self):
        path = self.folder / "full.pt"
        ddp.save_checkpoint(path, {"state": "old"})
        with self.assertRaises(OSError), unittest.mock.patch.object(os, "fsync", side_effect=OSError("no space left")):
            ddp.save_checkpoint(path, {"state": "new"})
        self.assertEqual(torch.load(path), {"state": "old"})

    def test_a_checkpoint_through_a_link_replaces_the_file_and_not_the_link(self):
        target, link = self.folder / "target.pt", self.folder / "link.pt"
        link.symlink_to(target)
        ddp.save_checkpoint(str(link), {"epoch": 1})
        self.assertTrue(link.is_symlink())
        self.assertEqual(torch.load(target), {"epoch": 1})

    def test_a_net_that_is_not_finite_does_not_replace_the_checkpoint(self):
        path = self.copy("finite.pt")
        for message in Ranks.run(2, failing, [*self.options, path, "--lr", "1e30"]):
            self.assertRegex(message, "FloatingPointError: before epoch 0, sample 1[26]")
        self.assertTrue(all(tensor.isfinite().all() for tensor in torch.load(path)["module"].values()))

    def test_a_job_that_diverges_without_a_checkpoint_fails_too(self):
        for message in Ranks.run(2, failing, [*SMALL, "--lr", "1e30"]):
            self.assertRegex(message, "FloatingPointError: before epoch 1, sample 0: loss or net not finite")

    def test_resuming_takes_the_learning_rate_from_the_command_line(self):
        self.assertEqual(self.resumed(self.copy("lr.pt"), "--lr", 0.5)[0]["lr"], 0.5)

    def test_resuming_keeps_adams_step_counters_on_the_cpu(self):
        self.assertEqual(self.resumed(self.copy("adam.pt"))[0]["steps"], [torch.tensor(2.0, device="cpu")] * 12)

    def test_a_file_that_is_no_checkpoint_is_refused_and_left_as_it_is(self):
        whole = self.path.read_bytes()
        torch.save({"epoch": 3}, self.folder / "foreign.pt")
        foreign, path = (self.folder / "foreign.pt").read_bytes(), self.folder / "bad.pt"
        for content in (b"", b"not a checkpoint", foreign, *(whole[:n] for n in (10, 5000, len(whole) - 1))):
            path.write_bytes(content)
            self.assertRegex(self.refused(path), "bad.pt is damaged or not a checkpoint")
            self.assertEqual(path.read_bytes(), content)
        self.assertRegex(self.refused(self.folder), r"not a checkpoint \(IsADirectoryError\)")

    def test_a_checkpoint_of_another_dataset_or_seed_is_refused_with_the_difference(self):
        self.assertIn("its data is SyntheticDataset, but here it is list", Ranks.run(2, failing, [
            *self.options, self.path], task=images)[0])
        for option, known in ("--num-samples", "samples is 44"), ("--length", "length is 64"), ("--seed", "seed is 0"):
            self.assertIn(f"its {known}, but here it is 99", self.refused(self.path, option, 99))

    def test_a_checkpoint_that_would_execute_something_does_not(self):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(TheCheckpoint.folder / "executed"),)
        torch.save(torch.load(self.path) | {"evil": Evil()}, self.folder / "evil.pt")
        self.assertIn("UnpicklingError", self.refused(self.folder / "evil.pt"))
        self.assertFalse((self.folder / "executed").exists())

    def test_a_folder_in_which_nothing_can_be_created_is_refused(self):
        self.assertIn("No such file", refusal("--checkpoint", self.folder / "nowhere" / "a.pt"))
        if sys.platform == "linux":  # here os.access says yes to root
            self.assertIn("cannot create a file there", refusal("--checkpoint", "/proc/x.pt"))


class TheJob(Test):
    def test_the_main_job_learns_and_reports_in_the_agreed_form(self):
        first, *lines, last = job(SCRIPT).splitlines()
        self.assertEqual(first, f"gloo, world size 2, cpu, torch {torch.__version__}")
        four, three = r"\d+\.\d{4}", r"[01]\.\d{3}"
        for epoch, line in enumerate(lines):
            self.assertRegex(line, rf"^epoch {epoch} \| loss {four} accuracy {three} \| val_loss {four} "
                                   rf"val_accuracy {three} \| \d+\.\d samples/s$")
        losses = [float(line.split()[4]) for line in lines]
        self.assertEqual((len(losses), losses), (6, sorted(losses, reverse=True)))
        self.assertGreater(float(lines[-1].split()[11]), 0.9)
        self.assertRegex(last, "^parameters sha256 [0-9a-f]{64}$")

    def test_all_ranks_hold_the_same_parameters_and_buffers_after_training(self):
        self.assertEqual(len({rank["digest"] for rank in Ranks.run(3, trained, SMALL)}), 1)

    def test_rank_0_alone_prints(self):
        ranks = Ranks.run(2, trained, SMALL)
        self.assertEqual((digest(ranks[0]["out"]), ranks[1]["out"]), (ranks[0]["digest"], ""))

    def test_loss_and_accuracy_are_those_of_all_ranks(self):
        ranks = Ranks.run(3, trained, [*SMALL, "--epochs", 1])
        of_training = [[sums for sums in rank["sums"] if sums[2] == 128 or sums[2] == 64][:8] for rank in ranks]
        loss, correct, labels = sum(sum(of_training, [])).tolist()
        self.assertIn(f"| loss {loss / labels:.4f} accuracy {correct / labels:.3f} |", ranks[0]["out"])

    def test_samples_a_second_are_those_of_all_ranks(self):
        out = Ranks.run(2, trained, [*SMALL, "--epochs", 1], seconds_a_look=0.5)[0]["out"]
        self.assertIn(f"| {44 / (0.5 * 13):.1f} samples/s\n", out)  # the clock was looked at 1 + 11 + 1 times later

    def test_on_a_terminal_a_progress_line_redraws_itself(self):
        path, options = self.folder / "progress.pt", [*SMALL, "--epochs", 1]
        Ranks.run(2, trained, [*options, "--checkpoint", path, "--checkpoint-every", 1], stop_at=9)
        out = Ranks.run(2, trained, [*options, "--checkpoint", path], terminal=True, seconds_a_look=1)[0]["out"]
        self.assertEqual(out.splitlines()[2:6], [
            f"epoch 0 step {line} samples/s  " for line in ("8/11 | 0.0", "9/11 | 2.0", "10/11 | 2.7", "11/11 | 3.0")])

    def test_each_option_changes_what_is_trained(self):
        digests = [Ranks.run(3, trained, [*SMALL, *options.split()])[0]["digest"] for options in (
            "", "--epochs 1", "--batch-size 3", "--accumulate 2", "--lr 0.1", "--drop-last", "--amp", "--seed 1",
            "--num-samples 40", "--length 65")]
        self.assertEqual(len(set(digests)), len(digests))

    def test_the_seed_reaches_order_data_and_net(self):
        rank = Ranks.run(1, trained, [*SMALL, "--seed", 7, "--epochs", 1])[0]
        order = list(TorchSampler(range(44), 1, 0, seed=7))
        self.assertEqual(rank["read"], [(7, i) for i in [0, *order]] + [(8, i) for i in range(25)])
        torch.manual_seed(7)
        self.assertEqual(rank["first_digest"], ddp.digest(ddp.ConvNet()))

    def test_the_jobs_validation_reads_every_sample_once_over_all_ranks(self):
        ranks = Ranks.run(3, trained, [*SMALL, "--epochs", 1])
        self.assertEqual(sorted(i for rank in ranks for seed, i in rank["read"] if seed == 1), list(range(25)))

    def test_drop_last_reaches_sampler_and_loader(self):
        options = [*SMALL, "--epochs", 1, "--drop-last", "--num-samples", 46, "--batch-size", 4]
        for rank, expected in zip(Ranks.run(3, trained, options), indices(46, num_replicas=3, drop_last=True)):
            self.assertEqual([i for seed, i in rank["read"] if seed == 0], [0, *expected[:12]])  # of 15; padded: 16

    def test_loader_workers_read_in_place_of_the_rank(self):
        rank = Ranks.run(1, trained, [*SMALL, "--epochs", 1, "--num-workers", 1])[0]
        self.assertEqual(rank["read"], [(0, 0)])  # for the layout of the buckets

    def test_a_checkpoint_is_saved_after_every_n_steps_and_each_epoch(self):
        saved = Ranks.run(2, trained, [*SMALL, "--checkpoint", self.folder / "every.pt", "--checkpoint-every", 4])
        self.assertEqual(saved[0]["saved"], [(0, 16), (0, 32), (1, 0), (1, 16), (1, 32), (2, 0)])

    def test_dropout_masks_differ_between_ranks_and_steps(self):
        states = sum((rank["random"] for rank in Ranks.run(3, trained, SMALL, task=images)), [])
        self.assertEqual((len(states), len(set(states))), (3 * 2 * 7, 3 * 2 * 7))

    def test_augmentation_differs_between_ranks(self):
        for num_workers in (0, 1):
            ranks = Ranks.run(2, trained, ["--epochs", 1, "--num-workers", num_workers], task=random_crops)
            for one, other in zip(*(rank["sums"][:3] for rank in ranks)):
                self.assertNotEqual(one[0], other[0])

    def test_data_parallel_on_a_cpu_is_the_net_in_one_process(self):
        dp, ddp_ = (Ranks.run(1, trained, [*SMALL, "--parallel", kind])[0] for kind in ("dp", "ddp"))
        self.assertIn("parallel dp, world size 1, cpu", dp["out"])
        self.assertEqual(dp["digest"], ddp_["digest"])

    def test_two_nodes_train_what_one_does(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        nodes = [start(*TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1",
                       f"--master-port={port}", "--nproc-per-node=1", SCRIPT, *SMALL, GLOO_SOCKET_IFNAME="lo")
                 for node in range(2)]
        (status, out, err), (status2, *_) = map(finish, nodes)
        self.assertEqual((status, status2), (0, 0), err)
        self.assertEqual(digest(out), Ranks.run(2, trained, SMALL)[0]["digest"])

    def test_torchrun_restarts_a_killed_rank_of_3_and_the_job_ends_as_if_it_had_not_been(self):
        options = [*SMALL, "--checkpoint", self.folder / "restarted.pt", "--checkpoint-every", 1]
        status, out, err = finish(with_fault(rank_1_is_killed, *options, launcher=[
            *TORCHRUN, "--standalone", "--nproc-per-node=3", "--max-restarts=1"]))
        self.assertEqual(status, 0, err)
        self.assertIn("resuming from", out)
        self.assertEqual(digest(out), Ranks.run(3, trained, SMALL)[0]["digest"])

    @classmethod
    @functools.cache
    def job_whose_rank_1_raises(cls):
        return finish(with_fault(rank_1_raises_and_nobody_can_leave, *SMALL, OMP_NUM_THREADS=None))

    def test_a_rank_that_raises_ends_the_job_with_its_traceback_alone(self):
        status, out, err = self.job_whose_rank_1_raises()
        self.assertEqual((status, err.count("Traceback")), (1, 1), err)
        self.assertRegex(err, r"(?s)^rank 1 failed:\nTraceback.*ValueError: this one\n\n?$")

    @unittest.skipUnless(torch.get_num_threads() > 1, "there is one core")
    def test_the_ranks_share_the_cores(self):
        status, out, err = self.job_whose_rank_1_raises()
        self.assertEqual(out.count(f"threads {torch.get_num_threads() // 2} "), 2, out)

    def test_gloo_uses_the_loopback_interface_on_one_machine(self):
        self.assertEqual(len(re.findall("interface lo0?\n", self.job_whose_rank_1_raises()[1])), 2)

    def test_a_rank_that_is_killed_ends_the_job_with_its_loader_workers_and_is_named(self):
        status, out, err = finish(with_fault(rank_1_is_killed, *SMALL, "--num-workers", 1))
        self.assertEqual(status, 128 + signal.SIGKILL)
        self.assertRegex(err, r"rank 1 was ended by SIGKILL\n$")
        self.assertNotIn("semaphore", err)

    def test_input_that_a_loader_worker_refuses_is_one_line_and_status_2(self):
        ddp.write_shards(self.folder / "shards", ddp.SyntheticDataset(4, 16), shard_size=2)
        good, bad = (self.folder / "shards" / f"00000{i}.tar" for i in range(2))
        bad.write_bytes(bad.read_bytes()[:700])
        # Bad is what is evaluated: the rank itself reads a sample to train on, for the layout of the buckets.
        status, out, err = finish(start(SCRIPT, "--nproc-per-node", 1, "--num-workers", 1, "--samples-per-epoch", 40,
                                        "--shards", good, "--val-shards", good, bad))
        self.assertEqual((status, err.count("\n")), (2, 1), err)
        self.assertRegex(err, "^ddp_reference.py: error: shard .*/000001.tar, 000002.x.npy: ")

    def test_a_job_without_one_full_batch_is_refused(self):
        messages = Ranks.run(1, failing, ["--drop-last", "--num-samples", 3])
        self.assertRegex(messages[0], "InputError: nothing to train on")

    def test_no_default_argument_of_pytorch_holds_the_process_group(self):
        # Else it outlives destroy_process_group, and its threads abort the interpreter now and then.
        self.assertIsNone(torch.distributed.nn.functional.all_reduce.__defaults__[1])
        self.assertLess(*map(SCRIPT.read_text().index, ("import torch.distributed.nn", "def ")))

    def test_ctrl_c_ends_a_job_quietly_also_if_the_launcher_alone_gets_it(self):
        jobs = [start(SCRIPT, *SMALL, "--epochs", "1000000", "--nproc-per-node", ranks) for ranks in (2, 1)]
        for process in jobs:
            read_until(process, "epoch 0")
        if sys.platform == "linux":
            self.assertEqual({address.split(":")[0] for address in self.listening(jobs[0].pid)}, {"0100007F"})
        os.kill(jobs[0].pid, signal.SIGINT)
        os.killpg(jobs[1].pid, signal.SIGINT)
        for process in jobs:
            status, out, err = finish(process)
            self.assertEqual((status, err), (130, ""))

    def listening(self, group):
        """The addresses, as /proc/net/tcp writes them, on which the processes of a process group listen."""
        sockets = set()
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(folder.name)) == group:
                    sockets |= {os.readlink(fd) for fd in (folder / "fd").iterdir()}
        rows = [line.split() for table in ("tcp", "tcp6")
                for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]]
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


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


class TheShards(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        ddp.main(f"write-shards {cls.folder}/train --num-samples 22 --length 40 --shard-size 5".split())
        ddp.main(f"write-shards {cls.folder}/val --num-samples 7 --length 40 --seed 1 --shard-size 3".split())
        cls.shards = sorted(map(str, cls.folder.glob("train/*.tar")))
        cls.options = ["--shards", f"{cls.folder}/train/*.tar", "--val-shards", f"{cls.folder}/val/*.tar",
                       "--samples-per-epoch", "40", "--epochs", "2"]

    def read(self, stream, num_workers=0):
        """The numbers of the samples that a stream gives, in order."""
        numbers = {tuple(x[0, :3].tolist()): i for i, (x, y) in enumerate(ddp.SyntheticDataset(22, 40))}
        loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
        return [numbers[tuple(x[0, :3].tolist())] for x, y in loader]

    def streams(self, num_replicas, samples_per_epoch=22, **options):
        return [ddp.ShardStream(self.shards, samples_per_epoch, num_replicas=num_replicas, rank=rank, **options)
                for rank in range(num_replicas)]

    def test_what_is_written_is_read_again(self):
        samples = [sample for path in self.shards for sample in ddp.read_shard(path)]
        self.assertEqual((len(self.shards), len(samples)), (5, 22))
        for i, sample in enumerate(samples):
            self.assertEqual((list(sample), sample["__key__"]), (["__key__", "x.npy", "y.npy"], f"{i:06d}"))
            for ours, original in zip((sample["x.npy"], sample["y.npy"]), ddp.SyntheticDataset(22, 40)[i]):
                self.assertTrue(np.array_equal(ours, original))

    def test_every_kind_of_member_is_decoded_skipped_or_left_as_bytes(self):
        folder, link, dotted = (tarfile.TarInfo(name) for name in ("a.dir", "a.link.txt", "."))
        folder.type = dotted.type = tarfile.DIRTYPE
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        long = "f" * 120 + "/" + "k" * 120
        members = [(dotted, None), (folder, None), ("a.x.NPY", npy(np.arange(3))), ("a.cls", b" 7\n"),
                   ("a.meta.json", b'{"b": [1]}'), (link, None), ("a.txt", "ä".encode()), ("a.jpg", b"\xff"),
                   ("README", b"no extension"), ("sub/a.cls", b"8"), (f"{long}.bin", b"z")]
        for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
            samples = list(ddp.read_shard(write_tar(self.folder / "kinds.tar", members, form)))
            self.assertEqual(samples[0].pop("x.npy").tolist(), [0, 1, 2])
            self.assertEqual(samples, [{"__key__": "a", "cls": 7, "meta.json": {"b": [1]}, "txt": "ä",
                                        "jpg": b"\xff"}, {"__key__": "sub/a", "cls": 8},
                                       {"__key__": long, "bin": b"z"}])

    def test_resampled_ranks_and_workers_read_equally_much_from_different_streams(self):
        for num_workers in (0, 2):
            ranks = [self.read(stream, num_workers) for stream in self.streams(3)]
            self.assertEqual([len(rank) for rank in ranks], [8, 8, 8])
            self.assertEqual(len({tuple(rank) for rank in ranks}), 3)
        self.assertEqual([len(stream) for stream in self.streams(3)], [8, 8, 8])
        workers = self.read(self.streams(1)[0], 2)
        self.assertNotEqual(workers[0::2], workers[1::2])

    def test_what_is_drawn_depends_on_seed_epoch_and_start(self):
        read = []
        for seed, *place in ((0, 0), (0, 0), (1, 0), (0, 1), (0, 0, 12)):
            stream = self.streams(2, seed=seed)[1]
            stream.set_epoch(*place)
            read.append(self.read(stream, num_workers=seed))
        self.assertEqual((read[0], len(read[4]), len(stream)), (read[1], 5, 5))
        self.assertEqual(len({tuple(one[:5]) for one in read}), 4)

    def test_without_resampling_each_sample_is_read_exactly_once(self):
        for num_replicas, num_workers in ((1, 0), (2, 0), (2, 2), (7, 0), (7, 1)):
            ranks = [self.read(stream, num_workers) for stream in self.streams(num_replicas, resampled=False)]
            self.assertEqual(sorted(itertools.chain(*ranks)), list(range(22)))

    def test_the_shuffle_buffer_mixes_samples_of_several_shards(self):
        in_order, mixed = (self.read(self.streams(1, shuffle_buffer=size)[0]) for size in (1, 15))
        self.assertEqual([b - a for a, b in zip(in_order, in_order[1:])].count(1), 17)
        self.assertLess([b - a for a, b in zip(mixed, mixed[1:])].count(1), 9)

    def test_a_loader_worker_fills_its_buffer_with_no_more_than_its_part_of_the_epoch(self):
        read, original = [], ddp.read_shard
        with unittest.mock.patch.object(ddp, "read_shard", lambda path: map(
                lambda sample: read.append(path) or sample, original(path))):
            next(iter(self.streams(2, samples_per_epoch=20)[0]))
        self.assertEqual(len(read), 10)

    def test_a_job_on_shards_evaluates_all_of_them(self):
        module, (x, y) = net(ddp.ConvNet), [torch.stack(part) for part in zip(*ddp.SyntheticDataset(7, 40, 1))]
        stream = ddp.ShardStream([f"{self.folder}/val/*.tar"], resampled=False, num_replicas=1, rank=0)
        of_shards, of_data = (ddp.evaluate(module, data, CPU) for data in (DataLoader(stream, 3), [(x, y)]))
        torch.testing.assert_close(of_shards, of_data)

    def test_two_ranks_train_on_shards_with_loader_workers(self):
        out = Ranks.run(2, trained, [*self.options, "--num-workers", 2])[0]["out"]
        losses = [float(line.split()[4]) for line in epoch_lines(out)]
        self.assertLess(losses[1], losses[0])

    def test_a_resumed_job_on_shards_ends_its_epoch_with_the_right_number_of_samples(self):
        options = [*self.options, "--epochs", 1, "--checkpoint", self.folder / "ck.pt", "--checkpoint-every", 1]
        Ranks.run(2, trained, options, stop_at=4)
        self.assertEqual(torch.load(self.folder / "ck.pt")["samples"], 24)
        stream = self.streams(1, samples_per_epoch=40)[0]
        stream.set_epoch(0, start=48)  # where more ranks have gone beyond the end
        self.assertEqual((len(stream), list(stream)), (0, []))
        ranks = Ranks.run(2, trained, options)
        self.assertIn("epoch 0, sample 24 of 40", ranks[0]["out"])
        self.assertEqual(sum(sums[2] for sums in ranks[0]["sums"] + ranks[1]["sums"]), (16 + 7) * 40)

    def test_what_is_no_shard_is_refused_with_file_and_member(self):
        shard = pathlib.Path(self.shards[0]).read_bytes()
        x, y = npy(np.zeros((3, 5), np.float32)), npy(np.zeros(5, np.int64))
        for content, message in (
                (b"", "bad.tar, at its end"), (b"PK not a tar" * 100, "bad.tar"), (bytes(1024), "without a sample"),
                (shard[:300], "bad.tar"), (shard[:700], "bad.tar, 000000.x.npy"),
                (shard[:-10240], "cut off|unexpected end"),
                (shard[:1536] + b"garbage!" * 64 + shard[2048:], "damaged"),
                ([("a.x.npy", x)], "bad.tar, sample a: x.npy or y.npy is missing"),
                ([("a.x.npy", x[:-1]), ("a.y.npy", y)], "bad.tar, a.x.npy"),
                ([("a.x.npy", npy(np.array([{}], dtype=object)))], "a.x.npy: Object arrays cannot be loaded"),
                ([("a.x.npy", x.replace(b"(3, 5)", b"(3, 5(")), ("a.y.npy", y)], "bad.tar, a.x.npy"),
                ([("a.meta.json", b"[" * 100_000)], "bad.tar, a.meta.json")):
            path = self.folder / "bad.tar"
            path.write_bytes(content) if isinstance(content, bytes) else write_tar(path, content)
            with self.subTest(message), self.assertRaisesRegex(ddp.InputError, message):
                list(ddp.ShardStream([str(path)], resampled=False, num_replicas=1, rank=0))

    def test_a_sample_that_is_cut_off_is_not_given_out(self):
        path = pathlib.Path(write_tar(self.folder / "cut.tar", [("a.bin", b"x" * 2000), ("b.bin", b"y" * 2000)]))
        path.write_bytes(path.read_bytes()[:512 + 2048 + 512 + 1000])
        samples = ddp.read_shard(str(path))
        self.assertEqual(len(next(samples)["bin"]), 2000)
        with self.assertRaisesRegex(ddp.InputError, "cut.tar, "):
            next(samples)

    def test_a_shard_that_is_missing_is_refused(self):
        message = Ranks.run(1, failing, [*self.options, "--val-shards", self.shards[0], "absent.tar"])[0]
        self.assertEqual(message, "InputError: there is no shard absent.tar")

    def test_writing_shards_overwrites_nothing(self):
        before = [path.read_bytes() for path in sorted(self.folder.glob("train/*"))]
        self.assertIn("File exists", refusal("write-shards", self.folder / "train"))
        self.assertEqual([path.read_bytes() for path in sorted(self.folder.glob("train/*"))], before)


class TheCases(Test):
    def shown(self, *options):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ddp.main(["cases", *options])
        return out.getvalue()

    def test_the_nine_cases_show_the_golden_batches(self):
        blocks = self.shown().strip().split("\n\n")
        for block, (case, (n, *_, epochs)) in zip(blocks, GOLDEN.items(), strict=True):
            self.assertRegex(block, rf"^case {case}: .*\n{n} samples, 2 ranks, batches of 4\n")
            for epoch, rank in itertools.product(range(2), range(2)):
                row = re.search(rf"epoch {epoch}  rank {rank}(.*)", block)[1]
                batches = [[int(i.rstrip("*")) for i in batch.split(", ")] for batch in re.findall(r"\[(.*?)\]", row)]
                self.assertEqual(batches, epochs[epoch][rank])

    def test_repeated_samples_are_marked(self):
        rows = self.shown("--num-samples", "10", "--nproc-per-node", "3").splitlines()
        self.assertEqual([row.count("*") for row in rows[3:9]], [0, 1, 1] * 2)

    def test_unread_samples_are_named(self):
        out = self.shown("--num-samples", "11", "--nproc-per-node", "3", "--drop-last", "--batch-size", "3")
        self.assertEqual(re.findall("read by no rank: (.*)", out), ["6 7", "5 9"])


class TheCommandLine(Test):
    def test_a_number_out_of_range_is_refused_with_the_range(self):
        for option, bad in {"--epochs": "0 -1 x 1.5", "--batch-size": "0 -4", "--num-samples": "0",
                            "--length": "0 1 100000000000000", "--lr": "0 -1 nan inf x", "--nproc-per-node": "0 100000",
                            "--num-workers": "-1", "--accumulate": "0", "--seed": "-1 4294967296", "--shard-size": "0",
                            "--checkpoint-every": "0", "--samples-per-epoch": "0"}.items():
            for value in bad.split():
                with self.subTest(option=option, value=value):
                    self.assertRegex(refusal(f"{option}={value}"), rf"argument {option}: invalid .* from .* '{value}'")

    def test_options_that_do_not_go_together_are_refused(self):
        for options, message in (("--wat", "unrecognized arguments: --wat"), ("--backend mpi", "invalid choice: 'mpi'"),
                                 ("--checkpoint-every 1", "needs --checkpoint"), ("--checkpoint=", "needs a PATH"),
                                 ("--shards x", "go together"),
                                 ("write-shards", "needs a DIR"), ("train x", "needs a DIR"),
                                 ("--parallel dp --amp", "one process"), ("--parallel dp --sync-bn", "one process"),
                                 ("--parallel dp --nproc-per-node 2", "one process"),
                                 (f"--backend nccl --nproc-per-node {GPUS + 1}", "use --backend gloo")):
            with self.subTest(options):
                self.assertIn(message, refusal(*options.split()))

    @unittest.skipIf(GPUS, "this machine has GPUs")
    def test_sync_bn_without_gpus_is_refused(self):
        self.assertIn("--sync-bn needs GPUs", refusal("--sync-bn"))

    def test_a_launchers_environment_that_is_not_whole_is_refused(self):
        self.assertIn("RANK is set", refusal(RANK="0"))

    def test_nproc_per_node_is_the_launchers(self):
        whole = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="x")
        self.assertIn("torchrun's own", refusal("--nproc-per-node", 2, **whole))

    def test_each_process_that_sees_one_gpu_uses_nccl(self):
        whole = dict(RANK="0", LOCAL_RANK="3", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", MASTER_ADDR="x")
        args = ddp.make_parser().parse_args([])
        with unittest.mock.patch.dict(os.environ, whole), \
                unittest.mock.patch.multiple(torch.cuda, device_count=lambda: 1, is_available=lambda: True):
            ddp.check_job(args, fail)
        self.assertEqual((args.backend, args.nproc_per_node), ("nccl", 8))


@unittest.skipUnless(GPUS, "needs a GPU")
class OnGPUs(Test):
    VISIBLE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}

    def test_the_main_job_runs_on_nccl_with_one_process_per_gpu(self):
        output = job(SCRIPT, **self.VISIBLE)
        self.assertTrue(output.startswith(f"nccl, world size {GPUS}, cuda, "), output)

    def test_options_learn_on_gpus(self):
        for options in ("--amp", "--sync-bn", "--num-workers 2", "--accumulate 2", "--parallel dp"):
            lines = job(SCRIPT, *options.split(), **self.VISIBLE).splitlines()
            self.assertGreater(float(lines[-2].split()[11]), 0.8, lines)

    def test_gloo_processes_share_a_gpu(self):
        output = job(SCRIPT, "--nproc-per-node", GPUS + 1, "--backend", "gloo", *SMALL, **self.VISIBLE)
        self.assertTrue(output.startswith(f"gloo, world size {GPUS + 1}, cuda, "), output)

    def test_a_resumed_job_goes_on(self):
        options = [SCRIPT, *SMALL, "--checkpoint", self.folder / "ck.pt", "--checkpoint-every", 1]
        job(*options, "--epochs", 1, **self.VISIBLE)
        self.assertIn("epoch 1, sample 0 of 44", job(*options, **self.VISIBLE))

    def test_gpus_on_which_cuda_cannot_start_are_refused(self):
        with unittest.mock.patch.object(torch.cuda, "is_available", lambda: False):
            self.assertIn("CUDA cannot start", refusal())


if "FAULT" in os.environ:
    globals()[os.environ["FAULT"]]()


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`."""
    result = unittest.main(exit=False, verbosity=2).result
    bad = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    failed, skipped = len(bad) + len(result.unexpectedSuccesses), len(result.skipped)
    sys.stderr.flush()
    print(f"{max(0, result.testsRun - failed - skipped)} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    sys.exit(ddp.main(sys.argv[1:])) if "FAULT" in os.environ else main()
