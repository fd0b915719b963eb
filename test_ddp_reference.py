"""The guarantees of ddp_reference.py, in its order: the names of the tests are the list.

    bash run.sh test                             # all of them; also: python -m pytest test_ddp_reference.py
    python test_ddp_reference.py -k sampler      # those with "sampler" in their name

The oracles: torch's own sampler, a single process on the whole batch, a job that was not interrupted.
"""

import ast, concurrent.futures, contextlib, datetime, functools, io, itertools, os, pathlib, re, shutil, signal
import socket, subprocess, sys, tarfile, tempfile, unittest, unittest.mock, warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler as TorchSampler

import ddp_reference as ddp

CPU = torch.device("cpu")
GPUS = torch.cuda.device_count()
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))
HERE = pathlib.Path(__file__).resolve().parent
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
SCRIPT = HERE / "ddp_reference.py"
TORCHRUN = ["-m", "torch.distributed.run", "--local-addr=127.0.0.1"]
SMALL = ["--num-samples", 44, "--length", 64, "--batch-size", 2, "--epochs", 2]


def setUpModule():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all but OnGPUs is on the CPU,
    torch.set_num_threads(1)  # and this process computes as the ranks do


@functools.cache
def processes():
    """The processes of all calls of run(): each imports torch once."""
    return concurrent.futures.ProcessPoolExecutor(5, mp.get_context("spawn"), initializer=ddp.end_with_parent)


def run(world_size, function, *args, **options):
    """[function(rank, *args, **options) of each rank], in a gloo group of so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [processes().submit(run_rank, rank, world_size, f"{folder}/store", function, args, options)
                 for rank in range(world_size)]
        return [rank.result() for rank in ranks]


def run_rank(rank, world_size, path, function, args, options):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    dist.init_process_group("gloo", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size,
                            timeout=datetime.timedelta(seconds=60))
    try:
        result = function(rank, *args, **options)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def start(*command, **environ):
    """Start a Python program, with one thread a rank, in a process group of its own; its output is piped."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    return subprocess.Popen([sys.executable, *map(str, command)], env=environ, start_new_session=True, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process, status=0):
    """(stdout, stderr) of a process that is to end with this status, once every process that holds them has ended."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        with process, contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, f"status {process.returncode}\n{out}\n{err}"
    return out, err


def before_call(owner, name, do, nth=None):
    """Have do(*args) called before each call of owner.name, or before the nth; return the function that undoes it."""
    original, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(original)
    def replaced(*args, **kwargs):
        if nth in (None, next(calls)):
            do(*args)
        return original(*args, **kwargs)
    setattr(owner, name, replaced)
    return lambda: setattr(owner, name, original)


def interrupt(*why):
    raise InterruptedError(*why)


def rank_1_raises_and_nobody_can_leave():
    def tell(*_):
        interface, addresses = os.environ.get("GLOO_SOCKET_IFNAME"), sorted(set(listening()))
        os.write(1, f"{torch.get_num_threads()} threads, {interface} {addresses}\n".encode())
    os.environ.pop("OMP_NUM_THREADS", None), os.environ.pop("GLOO_SOCKET_IFNAME", None)
    torch.set_num_threads(6)
    before_call(mp, "spawn", tell)
    before_call(ddp, "settle_buckets", tell)
    before_call(torch.optim.Adam, "step", nth=3, do=lambda *_: dist.get_rank() == 1 and interrupt("by a test"))
    before_call(dist, "destroy_process_group", signal.pause)


def listening():
    """The addresses at which this process listens."""
    for fd in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as opened:
            if opened.family != socket.AF_UNIX and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield opened.getsockname()[0]


def rank_1_is_killed():
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        before_call(torch.optim.Adam, "step", nth=3,
                    do=lambda *_: dist.get_rank() == 1 and signal.raise_signal(signal.SIGKILL))


def only_say_the_backend():
    before_call(ddp, "worker", lambda local_rank, args: sys.exit(args.backend))


def trained(rank, options, task=ddp.make_task, stop_at=0, terminal=False):
    """What a rank of a job reads, adds up, saves, seeds and prints, and its net's digest. It ends before step stop_at,
    if not 0; terminal says whether stdout is one; from one look at the clock to the next a second passes."""
    seen, out, clock = dict(read=[], sums=[], saved=[], seeds=[]), io.StringIO(), itertools.count()
    out.isatty = lambda: terminal
    args = ddp.make_parser().parse_args([
        "--backend", "gloo", "--num-samples", "100", *(str(option).replace("RANK", str(rank)) for option in options)])
    ddp.check_job(args, interrupt)
    with contextlib.ExitStack() as stack:
        for owner, name, look in (
                (ddp.SyntheticDataset, "__getitem__", lambda data, i: seen["read"].append((data.seed, i))),
                (ddp, "all_reduce_sums", lambda sums: seen["sums"].append(sums.tolist())),
                (ddp, "save_checkpoint", lambda path, state: seen["saved"].append((state["epoch"], state["samples"]))),
                (F, "dropout", lambda x, p, training, *_: training and seen["seeds"].append(torch.initial_seed())),
                (ddp, "resume", lambda path, job, module, *_: seen.update(module=module))):
            stack.callback(before_call(owner, name, look))
        stack.callback(before_call(torch.optim.Adam, "step", interrupt, stop_at))
        stack.enter_context(unittest.mock.patch.object(ddp, "make_task", task))
        stack.enter_context(unittest.mock.patch.object(ddp, "time", unittest.mock.Mock(perf_counter=clock.__next__)))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.suppress(InterruptedError))
        ddp.train(args, CPU)
    return seen | dict(out=out.getvalue(), digest=ddp.digest(seen.pop("module")))


def failing(rank, options, **how):
    """The message of the error with which a rank of a job ends, and its kind."""
    try:
        trained(rank, options, **how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def images(args, kind=int):
    """Images with one label each, a plain number; a net with Conv2d, Dropout and Linear."""
    x = torch.randn(50, 1, 8, 8, generator=torch.Generator().manual_seed(args.seed))
    data = [(image, kind(image[0, :4].sum() > image[0, 4:].sum())) for image in x]
    return data[:40], data[40:], nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 2))


class Augmented(ddp.SyntheticDataset):
    """One signal again and again, each time shifted by what PyTorch's generator draws."""

    def __getitem__(self, index):
        x, y = super().__getitem__(0)
        return x + torch.rand(()), y


def augmented(args):
    return Augmented(24, 8), ddp.SyntheticDataset(4, 8), ddp.ConvNet()


def net(norm=nn.Identity):
    """The same net in every process; without BatchNorm ranks and micro-batches add up to the whole batch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv1d(8, 3, 3, padding=1))


def epoch_lines(*outputs):
    """The different lines of epochs without their speed, which is never the same twice."""
    return list(dict.fromkeys(re.findall(r"^epoch \d+ \| .* \|(?= \d)", "".join(outputs), re.MULTILINE)))


def indices(n, epoch=0, start=0, *, num_replicas, **options):
    """What each rank reads of n samples."""
    samplers = [ddp.DistributedSampler(range(n), num_replicas, rank, **options) for rank in range(num_replicas)]
    for sampler in samplers:
        sampler.set_epoch(epoch, start)
    read = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(one) for one in read]
    return read


def operators_by(look):
    """Have look(operator, call) called in place of each of PyTorch's operators; call() is what it does and gives."""
    class ByLook(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            return look(operator, functools.partial(operator, *args, **(kwargs or {})))
    return ByLook()


def refusal(*options, **environ):
    """The one line with which a command line is refused, before any process is started."""
    with contextlib.redirect_stderr(io.StringIO()) as err, unittest.mock.patch.dict(os.environ, environ), \
            unittest.mock.patch.multiple(ddp, launch=interrupt, worker=interrupt), contextlib.suppress(SystemExit):
        ddp.main([*map(str, options)])
    assert err.getvalue().count("\n") == 1, err.getvalue()
    return err.getvalue()


class Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)


class TheTask(Test):
    def test_an_item_depends_on_seed_and_index_alone_also_in_loader_workers(self):
        dataset, longer = (ddp.SyntheticDataset(n, 50, seed=1) for n in (6, 100))
        in_workers = list(DataLoader(dataset, batch_size=None, num_workers=2, sampler=[5, 3, 0, 3]))
        torch.testing.assert_close(in_workers, [longer[i] for i in (5, 3, 0, 3)], rtol=0, atol=0)
        self.assertFalse(torch.equal(dataset[0][0], dataset[1][0]))
        self.assertFalse(torch.equal(dataset[0][0], ddp.SyntheticDataset(6, 50, seed=2)[0][0]))

    def test_y_is_the_channel_with_the_largest_moving_sum_of_standard_normal_x(self):
        x, y = ddp.SyntheticDataset()[99]
        self.assertEqual((x.dtype, x.shape, y.dtype, y.shape), (torch.float32, (3, 10000), torch.int64, (10000,)))
        torch.testing.assert_close(torch.std_mean(x), (torch.tensor(1.0), torch.tensor(0.0)), rtol=0, atol=0.03)
        sums = F.conv1d(x[:, None], torch.ones(1, 1, 3), padding=1)[:, 0]
        self.assertGreater((sums.argmax(0) == y).double().mean(), 0.9999)

    def test_an_index_out_of_range_is_an_index_error(self):
        for i in (-1, 100):
            self.assertRaises(IndexError, ddp.SyntheticDataset().__getitem__, i)

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
        data, module = pieces["SyntheticDataset"](5, 20), pieces["ConvNet"]()
        self.assertEqual(list(pieces["DistributedSampler"](data, 2, 1)), list(TorchSampler(data, 2, 1)))
        self.assertEqual(pieces["digest"](module), ddp.digest(module))
        pieces["save_checkpoint"](self.folder / "piece.pt", module.state_dict())
        torch.testing.assert_close(torch.load(self.folder / "piece.pt"), module.state_dict())

    def test_every_collective_call_is_marked(self):
        collective = re.compile(r"dist\.(?!is_init|get_|rendez|Prefix)|no_sync\(\)|\.backward\(\)| model\(x\)"
                                r"|Parallel\(module, |convert_sync")
        lines = [line for line in SCRIPT.read_text().splitlines() if collective.search(line)]
        self.assertEqual(["# DDP" in line for line in lines], [True] * 10)

    def test_the_readme_names_these_lines_and_the_tests_as_they_are(self):
        readme, tests = (HERE / "README.md").read_text(), pathlib.Path(__file__).read_text()
        lines = enumerate(SCRIPT.read_text().splitlines(), 1)
        self.assertIn("\n".join(f"{number}: {line.strip()}" for number, line in lines if "  # DDP" in line), readme)
        named = re.findall(r"^\|.*\| `(\w+)` \|[^|]*\|$", readme, re.MULTILINE)
        self.assertGreater(len(named), 20)
        self.assertEqual([name for name in named if f" test_{name}" not in tests], [])

    def test_the_script_of_the_readme_killed_and_resumed_trains_what_it_does_under_torchrun(self):
        shutil.copy(SCRIPT, self.folder)
        script, checkpoint = self.folder / "my_job.py", self.folder / "mine.pt"
        script.write_text(re.search(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)[1])
        options = ["--batch-size", 10, "--epochs", 2]
        expected, _ = finish(start(*TORCHRUN, "--standalone", "--nproc-per-node=2", script, *options))
        options += ["--nproc-per-node", 2, "--checkpoint", checkpoint, "--checkpoint-every", 1]
        process = start(script, *options)
        before = process.stdout.readline() + process.stdout.readline()
        while process.poll() is None and (saved := torch.load(checkpoint))["epoch"] * 1500 + saved["samples"] < 1800:
            pass
        process.kill()  # the ranks are to end with it
        finish(process, status=-signal.SIGKILL)
        after, _ = finish(start(script, *options))
        self.assertRegex(after, "resuming from .*: epoch 1, sample [1-9][0-9]* of 1500")
        self.assertEqual(epoch_lines(before, after), epoch_lines(expected))
        self.assertEqual(after.splitlines()[-1], expected.splitlines()[-1])  # the digest


class TheSampler(Test):
    def test_it_gives_the_indices_of_torchs_sampler_in_every_case(self):  # so int32 and int64 permutations agree
        for n, num_replicas, shuffle, drop_last, seed in itertools.chain(
                itertools.product(range(20), range(1, 8), (True, False), (True, False), (0, 7)),
                itertools.product((8191, 8192, 8193, 100_003), (1, 7), (True, False), (True, False), (3,))):
            for rank, epoch in itertools.product(range(num_replicas), (0, 5)):
                ours, torchs = (sampler(range(n), num_replicas, rank, shuffle, seed, drop_last)
                                for sampler in (ddp.DistributedSampler, TorchSampler))
                ours.set_epoch(epoch)
                torchs.set_epoch(epoch)
                self.assertEqual((list(ours), len(ours)), (list(torchs), len(torchs)))
                for name in "dataset num_replicas rank epoch drop_last shuffle seed num_samples total_size".split():
                    self.assertEqual(getattr(ours, name), getattr(torchs, name), name)

    def test_after_any_start_any_number_of_ranks_reads_the_rest_once(self):
        def in_order(**options):
            ranks = indices(n, 3, start, num_replicas=num_replicas, shuffle=shuffle, **options)
            self.assertLessEqual(max(map(len, ranks)) - min(map(len, ranks)), 1)
            return [i for turn in itertools.zip_longest(*ranks) for i in turn if i is not None]

        for n, num_replicas, shuffle in itertools.product((0, 1, 7, 24), range(1, 7), (True, False)):
            order = indices(n, 3, num_replicas=1, shuffle=shuffle)[0]
            for start in range(n + 1):
                rest = order[start:]
                self.assertEqual(in_order(pad=False), rest)
                self.assertEqual(in_order(), rest + (order * 7)[:-len(rest) % num_replicas])
                full = len(rest) // num_replicas * num_replicas
                self.assertEqual(in_order(drop_last=True), rest[:full])
                self.assertEqual(in_order(drop_last=True, pad=False), rest[:full])

    def test_a_second_pass_without_set_epoch_warns_with_the_remedy(self):
        sampler, unshuffled = (ddp.DistributedSampler(range(5), 2, 0, shuffle=shuffle) for shuffle in (True, False))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for epoch in range(3):
                sampler.set_epoch(epoch)
                list(sampler), list(unshuffled)
            self.assertRaisesRegex(UserWarning, r"call set_epoch\(epoch\)", list, sampler)
            list(sampler)

    def test_it_takes_four_bytes_a_sample_for_a_moment_and_then_its_own_part(self):
        def look(operator, call):
            result = call()
            if isinstance(result, torch.Tensor) and result._base is None:
                sizes.append(result.untyped_storage().nbytes())
            return result
        sizes = []
        with operators_by(look):
            iterator = iter(ddp.DistributedSampler(range(100_000), 8, 3))
        self.assertEqual((max(sizes), sizes[-1], type(next(iterator))), (400_000, 50_000, int))

    def test_its_memory_does_not_grow_without_shuffling(self):
        iterator = iter(ddp.DistributedSampler(range(2**50), 2**20, 5, shuffle=False))
        self.assertEqual([next(iterator), next(iterator)], [5, 5 + 2**20])

    def test_from_2_to_the_31_samples_on_its_permutation_is_int64(self):
        def look(operator, call):
            if "randperm" in str(operator):
                raise MemoryError(call.keywords.get("dtype", torch.int64))  # it would take 8 GB or more
            return call()
        for n, dtype in ((2**31 - 1, "int32"), (2**31, "int64")):
            with self.assertRaisesRegex(MemoryError, dtype), operators_by(look):
                iter(ddp.DistributedSampler(range(n), 8, 3))

    def test_what_cannot_be_dealt_out_is_an_error_that_says_why(self):
        for dataset, num_replicas, rank, start, error, message in (
                (range(5), 2, 2, 0, ValueError, r"rank is 2, but must be in .* \[0, 2\)"),
                (range(5), 2, -1, 0, ValueError, "rank is -1"), (range(5), 0, 0, 0, ValueError, r"\[0, 0\)"),
                (range(5), 2, 0, 6, ValueError, r"start is 6, but must be in \[0, 5\]"),
                (range(5), 2, 0, -1, ValueError, "start is -1"), (iter("abc"), 2, 0, 0, TypeError, "has no len")):
            with self.assertRaisesRegex(error, message):
                ddp.DistributedSampler(dataset, num_replicas, rank).set_epoch(0, start)


def stepped(model, loader, **options):
    """What train_steps makes of a model, with SGD: (state, samples read at each step, sums)."""
    sums = torch.zeros(3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = list(ddp.train_steps(model, loader, optimizer, CPU, sums, **options))
    return getattr(model, "module", model).state_dict(), samples, sums


def accumulated(rank):
    """stepped(), by two micro-batches of one sample a rank, and a gradient after each."""
    data, model, gradients = ddp.SyntheticDataset(8, 40), DistributedDataParallel(net()), []
    with contextlib.ExitStack() as stack:
        stack.callback(before_call(ddp, "batch_sums", lambda *_: gradients.append(model.module[0].bias.grad.tolist())))
        return *stepped(model, DataLoader(data, 1, sampler=ddp.DistributedSampler(data)), accumulate=2), gradients


def evaluated(rank, num_samples):
    data = ddp.SyntheticDataset(num_samples, 40)
    sampler = ddp.DistributedSampler(data, shuffle=False, pad=False)
    return ddp.evaluate(DistributedDataParallel(net(nn.BatchNorm1d)), DataLoader(data, 4, sampler=sampler), CPU)


class TheStep(Test):
    def test_accumulating_on_two_ranks_equals_one_step_of_one_process_on_all_their_batches(self):
        data = ddp.SyntheticDataset(8, 40)
        state, _, sums = stepped(net(), DataLoader(data, 4, sampler=ddp.DistributedSampler(data, 1, 0)))
        ranks = run(2, accumulated)
        for rank in ranks:
            torch.testing.assert_close(rank[0], state)
        torch.testing.assert_close(ranks[0][2] + ranks[1][2], sums, rtol=1e-6, atol=0)

    def test_ranks_exchange_gradients_only_with_the_last_micro_batch_of_a_step(self):
        of_rank_0, of_rank_1 = (gradients for *_, gradients in run(2, accumulated))
        self.assertEqual([ours == theirs for ours, theirs in zip(of_rank_0, of_rank_1)], [False, True] * 2)

    def test_the_last_shorter_step_is_by_the_mean_of_its_own_micro_batches(self):
        data = ddp.SyntheticDataset(5, 40)
        state, samples, _ = stepped(net(), DataLoader(data, 1), accumulate=2)
        self.assertEqual(samples, [0, 2, 4, 5])
        expected, *_ = stepped(net(), DataLoader(data, batch_sampler=[[0, 1], [2, 3], [4]]))
        torch.testing.assert_close(state, expected)

    def test_one_label_a_sample_is_counted_unless_cross_entropy_ignores_it(self):
        module = nn.Sequential(net(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        x, y = torch.randn(6, 3, 40), torch.tensor([0, 1, 2, 0, 1, -100])
        logits = module(x).detach()
        *_, sums = stepped(module, [(x, y)])
        expected = F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum(), 5
        torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)

    def test_amp_runs_a_net_of_float32_parameters_in_bfloat16(self):
        seen, module = set(), net()
        module[0].register_forward_hook(lambda *call: seen.add(call[-1].dtype))
        stepped(module, DataLoader(ddp.SyntheticDataset(2, 40)), amp=True)
        self.assertEqual((seen, module[0].weight.dtype), ({torch.bfloat16}, torch.float32))

    def test_the_steps_synchronise_with_the_device_nowhere(self):
        def look(operator, call):  # .item(), .tolist() and bool() call the first, a boolean mask the others
            assert str(operator).split(".")[1] not in ("_local_scalar_dense", "nonzero", "index"), "waits"
            return call()
        module, batch = net(), next(iter(DataLoader(ddp.SyntheticDataset(1, 40))))
        with operators_by(look):
            stepped(module, [batch] * 3, accumulate=2)
            self.assertRaises(AssertionError, torch.zeros(1).item)

    def test_evaluation_on_1_2_and_3_ranks_gives_the_numbers_of_one_batch_in_one_process(self):
        x, y = next(iter(DataLoader(ddp.SyntheticDataset(25, 40), 25)))
        logits = net(nn.BatchNorm1d).eval()(x)
        expected = F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).double().mean().item()
        for numbers in sum((run(world_size, evaluated, 25) for world_size in (1, 2, 3)), []):
            np.testing.assert_allclose(numbers, expected, rtol=1e-6)

    def test_a_rank_without_a_sample_takes_part_in_the_evaluation(self):
        for numbers in run(2, evaluated, 1):
            np.testing.assert_allclose(numbers, run(1, evaluated, 1)[0], rtol=1e-6)

    def test_the_digest_covers_parameters_and_buffers(self):
        module = net(nn.BatchNorm1d)
        digests = {ddp.digest(module)}
        for tensor in (module[3].bias.data, module[1].running_var, module[1].num_batches_tracked):
            tensor += 1
            digests.add(ddp.digest(module))
        self.assertEqual(len(digests), 4)


class TheCheckpoint(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.path, cls.options = cls.folder / "first.pt", [*SMALL, "--checkpoint-every", 1, "--checkpoint"]
        run(2, trained, [*cls.options, cls.path], stop_at=3)  # after 8 of 44 samples

    def exact(world_size, stops, *more, **how):
        """A test that a job which is stopped before these steps, and resumed each time, ends as one that is not."""
        def test(self):
            expected = run(world_size, trained, [*SMALL, *more], **how)[0]["out"]
            path = pathlib.Path(self.folder, self.id())
            outputs = [run(world_size, trained, [*self.options, path, *more], stop_at=stop_at, **how)[0]["out"]
                       for stop_at in (*stops, 0)]
            self.assertEqual(["resuming from" in output for output in outputs], [False] + [True] * len(stops))
            self.assertEqual(outputs[-1].splitlines()[-1], expected.splitlines()[-1])  # the digest
            self.assertEqual(epoch_lines(*outputs), epoch_lines(expected))
        return test

    test_a_resumed_job_on_2_ranks_is_the_uninterrupted_one = exact(2, (4, 12))
    test_a_resumed_job_on_3_ranks_is_the_uninterrupted_one = exact(3, (3, 4, 5))
    test_a_resumed_job_on_5_ranks_is_the_uninterrupted_one = exact(5, (4, 3))
    test_a_resumed_job_that_accumulates_is_the_uninterrupted_one = exact(3, (3, 4), "--accumulate", 2)
    test_a_resumed_job_with_loader_workers_is_the_uninterrupted_one = exact(3, (3,), "--num-workers", 1, "--epochs", 1)
    test_a_resumed_task_of_ones_own_with_dropout_is_the_uninterrupted_one = exact(3, (3, 5), task=images)
    test_a_resumed_job_with_augmentation_is_the_uninterrupted_one = exact(3, (3,), "--epochs", 1, task=augmented)

    def test_a_finished_job_is_not_trained_again(self):
        path = shutil.copy(self.path, self.folder / "finished.pt")
        self.assertEqual(*[(run(2, trained, [*self.options, path])[0]["digest"], path.read_bytes()) for _ in range(2)])

    def test_another_number_of_ranks_reads_the_rest_of_the_epoch_once(self):
        for world_size in (1, 3):
            path = shutil.copy(self.path, self.folder / "elastic.pt")
            ranks = run(world_size, trained, [*self.options, path])
            self.assertIn("epoch 0, sample 8 of 44", ranks[0]["out"])
            rest, new = (indices(44, *place, num_replicas=world_size) for place in ((0, 8), (1, 0)))
            for rank, *expected in zip(ranks, rest, new):
                read = [i for seed, i in rank["read"] if seed == 0]
                self.assertEqual(read, [0] + sum(expected, []))  # sample 0 settles the layout of the buckets

    def test_ranks_that_find_different_checkpoints_do_not_train(self):
        shutil.copy(self.path, self.folder / "of-rank-0.pt")
        for message in run(2, failing, [*SMALL, "--checkpoint", self.folder / "of-rank-RANK.pt"]):
            self.assertRegex(message, "^InputError: the ranks find different checkpoints")

    def test_a_kill_at_any_moment_of_writing_leaves_the_old_checkpoint_or_the_new_one(self):
        path = self.folder / "link.pt"
        path.symlink_to(self.folder / "written.pt")  # through a link, too
        flushing, renaming, flushing_the_folder = ("fsync", 1), ("replace", 1), ("fsync", 2)
        for (name, nth), left in ((flushing, "old"), (renaming, "old"), (flushing_the_folder, "new")):
            ddp.save_checkpoint(path, {"state": "old"})
            process = os.fork()
            if not process:
                before_call(os, name, lambda *_: signal.raise_signal(signal.SIGKILL), nth)
                try:
                    ddp.save_checkpoint(path, {"state": "new"})
                finally:
                    os._exit(0)
            self.assertEqual(os.WTERMSIG(os.waitpid(process, 0)[1]), signal.SIGKILL)
            self.assertEqual(torch.load(path, weights_only=True), {"state": left})
        self.assertEqual(([*self.folder.glob("*written.pt*")], path.is_symlink()), ([self.folder / "written.pt"], True))

    def test_a_net_that_is_not_finite_ends_the_job_before_it_is_saved(self):
        path = shutil.copy(self.path, self.folder / "finite.pt")
        for options, place in ([*self.options, path], "epoch 0, sample 1[26]"), (SMALL, "epoch 1, sample 0"):
            for message in run(2, failing, [*options, "--lr", "1e30"]):
                self.assertRegex(message, f"^FloatingPointError: before {place}: loss or net not finite")
        self.assertTrue(all(tensor.isfinite().all() for tensor in torch.load(path)["module"].values()))

    def resumed_optimizer(self, **options):
        module = ddp.ConvNet()
        optimizer = torch.optim.Adam(module.parameters(), **options)
        ddp.resume(self.path, torch.load(self.path)["job"], module, optimizer, CPU)
        return optimizer

    def test_resuming_takes_the_learning_rate_from_the_command_line(self):
        self.assertEqual(self.resumed_optimizer(lr=0.5).param_groups[0]["lr"], 0.5)

    def test_resuming_keeps_adams_step_counters_on_the_cpu(self):
        steps = [state["step"] for state in self.resumed_optimizer().state.values()]
        self.assertEqual(steps, [torch.tensor(2.0, device="cpu")] * 12)

    def not_resumed(self, path, *more, **how):
        """The line with which a job refuses a checkpoint."""
        messages = run(2, failing, [*self.options, path, *more], **how)
        self.assertEqual(messages[0], messages[1])
        self.assertRegex(messages[0], "^InputError: .*")
        return messages[0]

    def test_a_file_that_is_no_checkpoint_is_refused_untouched(self):
        whole, path = self.path.read_bytes(), self.folder / "bad.pt"
        torch.save({"epoch": 3}, path)
        for content in (path.read_bytes(), b"", b"not a checkpoint", *(whole[:n] for n in (10, 5000, len(whole) - 1))):
            path.write_bytes(content)
            self.assertRegex(self.not_resumed(path), "bad.pt is damaged or not a checkpoint")
            self.assertEqual(path.read_bytes(), content)
        self.assertRegex(self.not_resumed(self.folder), r"not a checkpoint \(IsADirectoryError\)")

    def test_a_checkpoint_of_another_job_is_refused_with_the_difference(self):
        for option, known in ("--num-samples", "samples is 44"), ("--length", "length is 64"), ("--seed", "seed is 0"):
            self.assertIn(f"{known}, but here it is 99", self.not_resumed(self.path, option, 99))
        self.assertIn("its data is SyntheticDataset, but here it is list", self.not_resumed(self.path, task=images))
        path, checkpoint = self.folder / "net.pt", torch.load(self.path)
        checkpoint["job"]["conv3.weight"] = [5, 32, 3]
        torch.save(checkpoint, path)
        self.assertIn("its conv3.weight is [5, 32, 3], but here it is [3, 32, 3]", self.not_resumed(path))

    def test_a_checkpoint_that_would_execute_something_does_not(self):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(TheCheckpoint.folder / "executed"),)
        torch.save(torch.load(self.path) | {"evil": Evil()}, self.folder / "evil.pt")
        self.assertIn("UnpicklingError", self.not_resumed(self.folder / "evil.pt"))
        self.assertFalse((self.folder / "executed").exists())


class TheJob(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.ranks = run(3, trained, [*SMALL, "--checkpoint", cls.folder / "ck.pt", "--checkpoint-every", 4])

    def test_the_main_job_reports_in_the_agreed_form_that_it_learns(self):
        out, four, three = finish(start(SCRIPT))[0], r"\d+\.\d{4}", r"[01]\.\d{3}"
        epochs = (rf"epoch {epoch} \| loss {four} accuracy {three} \| val_loss {four} val_accuracy {three} \| "
                  r"\d+\.\d samples/s\n" for epoch in range(6))
        self.assertRegex(out, rf"^gloo, world size 2, cpu, torch {re.escape(torch.__version__)}\n{''.join(epochs)}"
                              r"parameters sha256 [0-9a-f]{64}\n$")
        losses = re.findall(r"\| loss (\S+)", out)
        self.assertEqual(losses, sorted(losses, reverse=True))
        self.assertGreater(re.findall(r"val_accuracy (\S+)", out)[-1], "0.9")

    def test_a_job_of_one_rank_trains_what_a_plain_loop_does(self):
        torch.manual_seed(7)
        module, data = ddp.ConvNet(), ddp.SyntheticDataset(44, 64, seed=7)
        optimizer, sampler = torch.optim.Adam(module.parameters(), lr=0.02), TorchSampler(data, 1, 0, seed=7)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, 2, sampler=sampler):
                optimizer.zero_grad()
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
        for parallel in ("ddp", "dp"):
            rank = run(1, trained, [*SMALL, "--seed", 7, "--lr", 0.02, "--parallel", parallel])[0]
            self.assertEqual(rank["digest"], ddp.digest(module))

    def test_each_option_changes_what_is_trained(self):
        digests = [run(3, trained, [*SMALL, *options.split()])[0]["digest"] for options in (
            "", "--epochs 1", "--batch-size 3", "--accumulate 2", "--lr 0.1", "--drop-last", "--amp", "--seed 1",
            "--num-samples 40", "--length 65")]
        self.assertEqual(len(set(digests)), len(digests))

    def test_all_ranks_hold_the_same_parameters_and_buffers_after_training(self):
        self.assertEqual(len({rank["digest"] for rank in self.ranks}), 1)

    def test_rank_0_alone_prints(self):
        self.assertEqual([rank["out"] for rank in self.ranks[1:]], ["", ""])

    def test_rank_0_alone_writes_at_the_steps_asked_for(self):
        saved = [(0, 24), (0, 44), (1, 0), (1, 24), (1, 44), (2, 0)]
        self.assertEqual([rank["saved"] for rank in self.ranks], [saved, [], []])

    def test_loss_and_accuracy_are_those_of_all_ranks(self):
        for loss, correct, labels in np.sum([rank["sums"] for rank in self.ranks], axis=0)[[3, 7]]:  # of each epoch
            self.assertEqual(labels, 45 * 64)
            self.assertIn(f"| loss {loss / labels:.4f} accuracy {correct / labels:.3f} |", self.ranks[0]["out"])

    def test_the_jobs_validation_reads_every_sample_once_over_all_ranks(self):
        read = sorted(i for rank in self.ranks for seed, i in rank["read"] if seed == 1)
        self.assertEqual(read, sorted([*range(25)] * 2))  # in two epochs

    def test_samples_a_second_are_those_of_all_ranks(self):
        self.assertEqual(self.ranks[0]["out"].count(f"| {45 / 10:.1f} samples/s\n"), 2)  # 10 more looks at the clock

    def test_on_a_terminal_a_progress_line_redraws_itself(self):
        options = [*SMALL, "--epochs", 1, "--accumulate", 2, "--checkpoint", self.folder / "progress.pt"]
        run(2, trained, [*options, "--checkpoint-every", 1], stop_at=4)
        lines = [re.findall(r"step (\S+ \| \S+) samples/s  \r", rank["out"])
                 for rank in run(2, trained, options, terminal=True)]
        self.assertEqual(lines, [["3/6 | 0.0", "4/6 | 4.0", "5/6 | 5.3", "6/6 | 5.0"], []])

    def test_drop_last_reaches_sampler_and_loader(self):
        options = [*SMALL, "--epochs", 1, "--drop-last", "--num-samples", 46, "--batch-size", 4]
        for i, (rank, mine) in enumerate(zip(run(3, trained, options), indices(46, num_replicas=3, drop_last=True))):
            self.assertEqual([j for _, j in rank["read"]], [0, *mine[:12], *range(i, 25, 3)])  # of 15; padded: 16

    def test_loader_workers_read_in_place_of_the_rank(self):
        rank = run(1, trained, [*SMALL, "--epochs", 1, "--num-workers", 1])[0]
        self.assertEqual(rank["read"], [(0, 0)])  # for the layout of the buckets

    def test_dropout_masks_differ_between_ranks_and_steps(self):
        seeds = sum((rank["seeds"] for rank in run(3, trained, SMALL, task=images)), [])
        self.assertEqual((len(seeds), len(set(seeds))), (3 * 2 * 7, 3 * 2 * 7))

    def test_augmentation_differs_between_ranks(self):
        for num_workers in (0, 1):
            one, other = run(2, trained, ["--epochs", 1, "--num-workers", num_workers], task=augmented)
            self.assertNotEqual(one["sums"][1], other["sums"][1])

    def test_a_job_without_fitting_data_is_refused(self):
        shards = "--shards a.tar --val-shards a.tar --samples-per-epoch 4"
        for options, task, message in (("--drop-last --num-samples 3", ddp.make_task, "nothing to train on: no rank"),
                                       (shards, ddp.make_task, "there is no shard a.tar"),
                                       ("", functools.partial(images, kind=float), "labels must be integers")):
            self.assertIn(f"InputError: {message}", run(1, failing, options.split(), task=task)[0])

    def test_two_nodes_train_what_one_does(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        nodes = [start(*TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", "--master-port", port,
                       "--nproc-per-node=1", SCRIPT, *SMALL, GLOO_SOCKET_IFNAME=LOOPBACK) for node in range(2)]
        (out, _), _ = map(finish, nodes)
        self.assertIn(run(2, trained, SMALL)[0]["digest"], out)

    def test_torchrun_restarts_a_killed_job_on_3_ranks_as_if_it_had_not_been_killed(self):
        out, _ = finish(start(
            *TORCHRUN, "--standalone", "--nproc-per-node=3", "--max-restarts=1", __file__, *SMALL, "--checkpoint",
            self.folder / "killed.pt", "--checkpoint-every", 1, FAULT="rank_1_is_killed"))
        self.assertIn("resuming from", out)
        self.assertIn(self.ranks[0]["digest"], out)

    @classmethod
    @functools.cache
    def job_whose_rank_1_raises(cls):
        return finish(start(__file__, *SMALL, FAULT="rank_1_raises_and_nobody_can_leave"), status=1)

    def test_a_rank_that_raises_ends_the_job_with_its_traceback_alone(self):
        _, err = self.job_whose_rank_1_raises()
        self.assertEqual(err.count("Traceback"), 1, err)
        self.assertRegex(err, r"(?s)^rank 1 failed:\nTraceback.*InterruptedError: by a test\n\n?$")

    def test_a_job_on_one_machine_listens_on_the_loopback_address_alone(self):
        out, _ = self.job_whose_rank_1_raises()
        self.assertEqual(sorted(re.findall("threads, (.*)", out)), ["None []"] + [f"{LOOPBACK} ['127.0.0.1']"] * 2)

    def test_the_ranks_share_the_cores(self):
        out, _ = self.job_whose_rank_1_raises()
        self.assertEqual(out.count(f"3 threads, {LOOPBACK} "), 2, out)

    def test_a_rank_that_is_killed_ends_the_whole_job_which_names_it(self):
        _, err = finish(start(__file__, *SMALL, "--num-workers", 1, FAULT="rank_1_is_killed"), 128 + signal.SIGKILL)
        self.assertRegex(err, r"rank 1 was ended by SIGKILL\n$")
        self.assertNotIn("semaphore", err)

    def test_no_default_argument_of_pytorch_holds_the_process_group(self):
        self.assertIsNone(torch.distributed.nn.functional.all_reduce.__defaults__[1])
        self.assertLess(*map(SCRIPT.read_text().index, ("import torch.distributed.nn", "def ")))

    def test_ctrl_c_ends_a_job_quietly_also_if_the_launcher_alone_gets_it(self):
        jobs = [start(SCRIPT, *SMALL, "--epochs", "1000000", "--nproc-per-node", ranks) for ranks in (2, 1)]
        for process in jobs:
            process.stdout.readline()  # now it trains
        os.kill(jobs[0].pid, signal.SIGINT)
        os.killpg(jobs[1].pid, signal.SIGINT)
        for process in jobs:
            self.assertEqual(finish(process, status=130)[1], "")


def npy(array):
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


def tar(members, form=tarfile.PAX_FORMAT):
    """The bytes of a tar of (name, data) or (name, data, type) members."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=form) as file:
        for name, data, *kind in members:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(data), (*kind, tarfile.REGTYPE)[0]
            file.addfile(member, io.BytesIO(data))
    return content.getvalue()


class TheShards(Test):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        ddp.main(f"write-shards {cls.folder}/train --num-samples 22 --length 40 --shard-size 5".split())
        ddp.main(f"write-shards {cls.folder}/val --num-samples 7 --length 40 --seed 1 --shard-size 3".split())
        cls.shards = sorted(map(str, cls.folder.glob("train/*.tar")))
        cls.options = ["--shards", f"{cls.folder}/train/*.tar", "--val-shards", f"{cls.folder}/val/*.tar",
                       "--samples-per-epoch", 40, "--epochs", 1]

    def read(self, stream, num_workers=0):
        """The numbers of the samples that a stream gives, in order."""
        numbers = {x.numpy().tobytes(): (i, y) for i, (x, y) in enumerate(ddp.SyntheticDataset(22, 40))}
        samples = [(*numbers[x.numpy().tobytes()], y) for x, y in DataLoader(stream, None, num_workers=num_workers)]
        self.assertTrue(all(torch.equal(y, expected) for _, y, expected in samples))
        return [i for i, *_ in samples]

    def streams(self, num_replicas, samples_per_epoch=22, **options):
        return [ddp.ShardStream(self.shards, samples_per_epoch, num_replicas=num_replicas, rank=rank, **options)
                for rank in range(num_replicas)]

    def test_every_kind_of_member_is_decoded_skipped_or_left_as_bytes(self):
        long, path = "f" * 120 + "/" + "k" * 120, self.folder / "kinds.tar"
        members = [(".", b"", tarfile.DIRTYPE), ("a.dir", b"", tarfile.DIRTYPE), ("a.x.NPY", npy(np.arange(3))),
                   ("a.cls", b" 7\n"), ("a.meta.json", b'{"b": [1]}'), ("a.link.txt", b"", tarfile.SYMTYPE),
                   ("a.txt", "ä".encode()), ("a.jpg", b"\xff"), ("README", b"no extension"), ("sub/a.cls", b"8"),
                   (f"{long}.bin", b"z")]
        for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
            path.write_bytes(tar(members, form))
            samples = list(ddp.read_shard(path))
            self.assertEqual(samples[0].pop("x.npy").tolist(), [0, 1, 2])
            self.assertEqual(samples, [{"__key__": "a", "cls": 7, "meta.json": {"b": [1]}, "txt": "ä", "jpg": b"\xff"},
                                       {"__key__": "sub/a", "cls": 8}, {"__key__": long, "bin": b"z"}])

    def test_resampled_ranks_and_workers_read_equally_much_from_different_streams(self):
        for num_workers in (0, 2):
            ranks = [self.read(stream, num_workers) for stream in self.streams(3)]
            self.assertEqual([len(rank) for rank in ranks], [8, 8, 8])
            self.assertEqual(len({tuple(rank) for rank in ranks}), 3)
        self.assertNotEqual(ranks[0][0::2], ranks[0][1::2])  # of two workers

    def test_what_is_drawn_depends_on_seed_epoch_and_start(self):
        read = []
        for seed, *place in ((0, 0), (0, 0), (1, 0), (0, 1), (0, 0, 12), (0, 0, 24)):
            stream = self.streams(2, seed=seed, shuffle_buffer=3)[1]
            stream.set_epoch(*place)
            read.append(self.read(stream, num_workers=seed))
            self.assertEqual(len(read[-1]), len(stream))
        self.assertEqual([len(one) for one in read], [11, 11, 11, 11, 5, 0])
        self.assertEqual(read[0], read[1])
        self.assertEqual(len({tuple(one[:5]) for one in read[:5]}), 4)

    def test_without_resampling_each_sample_that_was_written_is_read_exactly_once(self):
        for num_replicas, num_workers in ((1, 0), (2, 0), (2, 2), (7, 0), (7, 1)):
            ranks = [self.read(stream, num_workers) for stream in self.streams(num_replicas, resampled=False)]
            self.assertEqual(sorted(itertools.chain(*ranks)), list(range(22)))

    def test_the_shuffle_buffer_mixes_samples_of_several_shards(self):
        in_order, mixed = (self.read(self.streams(1, shuffle_buffer=size)[0]) for size in (1, 15))
        self.assertEqual([b - a for a, b in zip(in_order, in_order[1:])].count(1), 17)
        self.assertLess([b - a for a, b in zip(mixed, mixed[1:])].count(1), 9)

    def test_a_rank_fills_its_buffer_with_no_more_than_its_part_of_the_epoch(self):
        read, original = [], ddp.read_shard
        with unittest.mock.patch.object(ddp, "read_shard", lambda path: map(
                lambda sample: read.append(path) or sample, original(path))):
            next(iter(self.streams(2, samples_per_epoch=20)[0]))
        self.assertEqual(len(read), 10)

    def test_a_resumed_job_on_shards_ends_its_epoch_with_the_right_number_of_samples(self):
        options = [*self.options, "--checkpoint", self.folder / "ck.pt", "--checkpoint-every", 1, "--num-workers", 1]
        run(2, trained, options, stop_at=4)
        ranks = run(2, trained, options)
        self.assertIn("epoch 0, sample 24 of 40", ranks[0]["out"])
        of_training, of_evaluation = (sum(rank["sums"][i][2] for rank in ranks) for i in (-2, -1))
        self.assertEqual((of_training, of_evaluation), (40 * 40, 7 * 40))

    def test_what_is_no_shard_is_refused_with_file_and_member(self):
        shard, path = pathlib.Path(self.shards[0]).read_bytes(), self.folder / "bad.tar"
        x, y = npy(np.zeros((3, 5), np.float32)), npy(np.zeros(5, np.int64))
        for content, message in (
                (b"", "bad.tar, at its end"), (b"PK not a tar" * 100, "bad.tar"), (bytes(1024), "without a sample"),
                (shard[:300], "bad.tar"), (shard[:700], "bad.tar, 000000.x.npy"),
                (shard[:-10240], "cut off|unexpected end"),
                (shard[:1536] + b"garbage!" * 64 + shard[2048:], "damaged"),
                (tar([("a.x.npy", x)]), "bad.tar, sample a: x.npy or y.npy is missing"),
                (tar([("a.x.npy", x[:-1]), ("a.y.npy", y)]), "bad.tar, a.x.npy"),
                (tar([("a.x.npy", npy(np.array([{}], dtype=object)))]), "a.x.npy: Object arrays cannot be loaded"),
                (tar([("a.x.npy", x.replace(b"(3, 5)", b"(3, 5(")), ("a.y.npy", y)]), "bad.tar, a.x.npy"),
                (tar([("a.meta.json", b"[" * 100_000)]), "bad.tar, a.meta.json")):
            path.write_bytes(content)
            given = []
            with self.subTest(message), self.assertRaisesRegex(ddp.InputError, message):
                given.extend(ddp.ShardStream([str(path)], resampled=False, num_replicas=1, rank=0))
            self.assertLess(len(given), 5)  # not the one that is cut off

    def test_what_a_loader_worker_refuses_is_one_line_with_status_2(self):
        bad = self.folder / "cut.tar"
        bad.write_bytes(pathlib.Path(self.shards[0]).read_bytes()[:700])
        # It is for evaluation: of the training data the rank itself reads a sample, for the layout of the buckets.
        _, err = finish(start(SCRIPT, "--nproc-per-node", 1, "--num-workers", 1, *self.options, "--val-shards",
                              self.shards[0], bad), status=2)
        self.assertRegex(err, r"^ddp_reference.py: error: shard .*/cut.tar, 000000.x.npy: .*\n$")

    def test_writing_shards_overwrites_nothing(self):
        before = [path.read_bytes() for path in sorted(self.folder.glob("train/*"))]
        self.assertIn("File exists", refusal("write-shards", self.folder / "train"))
        self.assertEqual([path.read_bytes() for path in sorted(self.folder.glob("train/*"))], before)


# What two real NCCL ranks printed with torch's sampler (seed 0, batches of 4): by case the number of samples, and
# the batches of rank 0 and rank 1 in the first epoch and in the second.
GOLDEN = {
    "1": (8, ["[0, 1, 2, 3]  [4, 5, 6, 7]"] * 4),
    "2": (8, ["[4, 7, 2, 1]", "[0, 3, 5, 6]"] * 2),
    "3": (8, ["[4, 7, 2, 1]", "[0, 3, 5, 6]", "[5, 2, 7, 1]", "[4, 6, 3, 0]"]),
    "4": (6, ["[2, 3, 1]", "[5, 0, 4]"] * 2),
    "4, dropping the short batch": (6, ["", ""] * 2),
    "5": (5, ["[4, 1, 2]", "[0, 3, 4]"] * 2),
    "5, with set_epoch": (5, ["[4, 1, 2]", "[0, 3, 4]", "[0, 2, 1]", "[4, 3, 0]"]),
    "6": (10, ["[4, 7, 3, 0]  [6]", "[1, 5, 9, 8]  [2]"] * 2),
    "7": (10, ["[4, 7, 3, 0]", "[1, 5, 9, 8]"] * 2),
}


class TheCases(Test):
    def shown(self, *options):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ddp.main(["cases", *options])
        return out.getvalue()

    def test_the_nine_cases_show_the_golden_batches(self):
        blocks = self.shown().strip().split("\n\n")
        for block, (case, (num_samples, batches)) in zip(blocks, GOLDEN.items(), strict=True):
            self.assertRegex(block, rf"^case {case}: .*\n{num_samples} samples, 2 ranks, batches of 4\n")
            self.assertEqual(re.findall(r"epoch \d  rank \d *(.*)", block.replace("*", "")), batches)

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

    def test_options_that_cannot_work_are_refused(self):
        for options, message in (
                ("--wat", "unrecognized arguments: --wat"), ("--backend mpi", "invalid choice: 'mpi'"),
                ("--checkpoint-every 1", "needs --checkpoint"), ("--checkpoint=", "needs a PATH"),
                ("--checkpoint no/a.pt", "cannot create a file there: No such file"),
                *[("--checkpoint /proc/a.pt", "cannot create a file there")] * (LOOPBACK == "lo"),
                ("--shards x", "go together"), ("write-shards", "needs a DIR"), ("train x", "needs a DIR"),
                ("--parallel dp --amp", "one process"), ("--parallel dp --sync-bn", "one process"),
                ("--parallel dp --nproc-per-node 2", "one process"),
                ("--sync-bn", "--sync-bn needs GPUs"), ("--backend nccl", "use --backend gloo")):
            with self.subTest(options):
                self.assertIn(message, refusal(*options.split()))

    def test_what_does_not_go_with_a_launcher_is_refused(self):
        self.assertIn("RANK is set, but not LOCAL_RANK", refusal(RANK="0"))
        self.assertIn("torchrun's own", refusal("--nproc-per-node", 2, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2",
                                                LOCAL_WORLD_SIZE="2", MASTER_ADDR="x"))


@unittest.skipUnless(GPUS, "needs a GPU")
class OnGPUs(Test):
    def finish(self, *options):
        return finish(start(SCRIPT, *options, CUDA_VISIBLE_DEVICES=VISIBLE))[0]

    def test_the_main_job_learns_with_one_process_per_gpu(self):
        for options in ("", "--amp", "--sync-bn", "--num-workers 2", "--accumulate 2", "--parallel dp"):
            first, *_, epoch, _ = self.finish(*options.split()).splitlines()
            self.assertIn("dp, world size 1, cuda" if "dp" in options else f"nccl, world size {GPUS}, cuda, ", first)
            self.assertGreater(float(epoch.split()[11]), 0.8)

    def test_gloo_processes_share_a_gpu(self):
        out = self.finish("--nproc-per-node", GPUS + 1, "--backend", "gloo", *SMALL)
        self.assertTrue(out.startswith(f"gloo, world size {GPUS + 1}, cuda, "), out)

    def test_a_launched_process_that_sees_one_gpu_of_its_own_uses_nccl(self):
        _, err = finish(start(
            __file__, FAULT="only_say_the_backend", CUDA_VISIBLE_DEVICES=VISIBLE.split(",")[0],
            RANK="0", LOCAL_RANK="3", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", MASTER_ADDR="x"), status=1)
        self.assertEqual(err, "nccl\n")

    def test_a_resumed_job_goes_on(self):
        options = [*SMALL, "--checkpoint", self.folder / "ck.pt", "--checkpoint-every", 1]
        self.finish(*options, "--epochs", 1)
        self.assertIn("epoch 1, sample 0 of 44", self.finish(*options))


if "FAULT" in os.environ:
    globals()[os.environ["FAULT"]]()


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`."""
    result = unittest.main(exit=False, verbosity=2).result
    bad = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    failed, skipped = len(bad) + len(result.unexpectedSuccesses), len(result.skipped)
    print(f"{max(0, result.testsRun - failed - skipped)} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0 or not result.testsRun)  # -k NAME may be mistyped


if __name__ == "__main__":
    sys.exit(ddp.main(sys.argv[1:])) if "FAULT" in os.environ else main()
