"""The guarantees of ddp_reference.py. The names of the tests are the list of them.

    bash run.sh test                 # all of them; also: python -m pytest test_ddp_reference.py
    bash run.sh test -k Lesson       # the six lessons: the acceptance test of a machine with GPUs
    bash run.sh test experiments     # print the table of Lesson 2

First come six lessons: what data-parallel training guarantees. Each compares what ranks do with an
oracle: PyTorch's own sampler, one process that has the whole batch, or a loop in plain PyTorch.
Then come the other guarantees, in the order of the chapters of ddp_reference.py.

Two helpers, between the lessons and the chapters, start ranks. on_ranks(3, function, *args) calls
function(device, *args) on each of three ranks and returns the three results. run_job(3, options)
runs a whole job on three ranks and returns what each rank printed.

To test a new option of training, add it to OPTIONS in Lesson 6 and to plain_loop() there. If it
needs no oracle, add it to the options in Chapter4Loop that must change the net.
"""

import collections
import contextlib
import copy
import functools
import io
import itertools
import logging
import os
import pathlib
import random
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
import unittest
import warnings
from unittest import TestCase, mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate
from torch.utils.data import DistributedSampler as TorchSampler

import ddp_reference as ddp

HERE = pathlib.Path(__file__).resolve().parent
FILE = shlex.quote(str(HERE / "ddp_reference.py"))
README = (HERE / "README.md").read_text()
GPUS = torch.cuda.device_count()


def setUpModule():
    """Make a folder for all tests, and say on what their ranks run."""
    global FOLDER
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    FOLDER = folder.name
    if GPUS:
        print(
            f"Up to {GPUS} ranks run on NCCL, with a GPU each. More ranks share the GPUs, on gloo."
        )
    else:
        print("The ranks run on gloo and the CPU, because PyTorch sees no GPU.")


# ---- Lesson 1: which samples a rank reads (DistributedSampler)
# Everything rests on one fact. Let each of W ranks read every W-th position of an order, in batches
# of B / W. Then the k-th batches of all ranks are together the positions kB to kB + B - 1, whatever
# W is. In other words: reading one index of each rank in turn gives the order back. To break it,
# leave out `+ self.rank` in DistributedSampler. Then every rank reads the samples of rank 0, and
# the first test says that two lists differ.
class Lesson1Sampler(TestCase):
    def test_on_any_number_of_ranks_and_after_any_stop_the_ranks_read_one_order_in_turn(self):
        dataset = range(24)
        order = list(TorchSampler(dataset, num_replicas=1, rank=0, seed=7))
        for world_size, samples_read in itertools.product((1, 2, 3, 4, 6, 12), (0, 12)):
            ranks = []
            for rank in range(world_size):
                sampler = ddp.DistributedSampler(dataset, world_size, rank)
                sampler.set_epoch(7, samples_read)  # PyTorch, too, adds the epoch to the seed.
                self.assertEqual(len(sampler), (24 - samples_read) / world_size)
                ranks.append(sampler)

            read_in_turn = list(itertools.chain.from_iterable(zip(*ranks, strict=True)))
            self.assertEqual(read_in_turn, order[samples_read:], f"on {world_size} ranks")

    def test_the_indices_and_the_attributes_are_those_of_pytorchs_sampler(self):
        cases = itertools.product(range(20), range(1, 7), (True, False), (True, False))
        # More than 2**16 samples: our permutation is of int32, PyTorch's of int64.
        for num_samples, num_replicas, shuffle, drop_last in [*cases, (70000, 2, True, False)]:
            for rank in range(num_replicas):
                # All arguments of the samplers in their order. The seed is 7.
                arguments = range(num_samples), num_replicas, rank, shuffle, 7, drop_last
                ours = ddp.DistributedSampler(*arguments)
                torchs = TorchSampler(*arguments)
                ours.set_epoch(5)
                torchs.set_epoch(5)

                self.assertTrue(list(ours) == list(torchs), arguments)
                # Ours has the attributes of PyTorch's, and others: <= is the relation of subsets.
                self.assertLessEqual(vars(torchs).items(), vars(ours).items(), arguments)


# ---- Lesson 2: seven experiments (DistributedSampler)
# Two ranks read batches of 4 by a DataLoader, for two epochs. The README tells what each experiment
# teaches. The numbers are older than this project: a job on two GPUs had printed them, with
# PyTorch's sampler. To break it, leave out `% len(order)` in DistributedSampler. Then experiment 5,
# in which a sample is read twice, ends with an IndexError.
EXPERIMENTS = """
                  epoch 0                      epoch 1
1. 8 samples, no sampler
         rank 0   [0, 1, 2, 3] [4, 5, 6, 7]    [0, 1, 2, 3] [4, 5, 6, 7]
         rank 1   [0, 1, 2, 3] [4, 5, 6, 7]    [0, 1, 2, 3] [4, 5, 6, 7]
2. 8 samples
         rank 0   [4, 7, 2, 1]                 [4, 7, 2, 1]
         rank 1   [0, 3, 5, 6]                 [0, 3, 5, 6]
3. 8 samples, set_epoch
         rank 0   [4, 7, 2, 1]                 [5, 2, 7, 1]
         rank 1   [0, 3, 5, 6]                 [4, 6, 3, 0]
4. 6 samples
         rank 0   [2, 3, 1]                    [2, 3, 1]
         rank 1   [5, 0, 4]                    [5, 0, 4]
   6 samples, drop_last
         rank 0
         rank 1
5. 5 samples
         rank 0   [4, 1, 2]                    [4, 1, 2]
         rank 1   [0, 3, 4]                    [0, 3, 4]
   5 samples, set_epoch
         rank 0   [4, 1, 2]                    [0, 2, 1]
         rank 1   [0, 3, 4]                    [4, 3, 0]
6. 10 samples
         rank 0   [4, 7, 3, 0] [6]             [4, 7, 3, 0] [6]
         rank 1   [1, 5, 9, 8] [2]             [1, 5, 9, 8] [2]
7. 10 samples, drop_last
         rank 0   [4, 7, 3, 0]                 [4, 7, 3, 0]
         rank 1   [1, 5, 9, 8]                 [1, 5, 9, 8]
"""


def experiments(sampler_class):
    """Do the experiments, with samplers of this class: return the table."""
    table = EXPERIMENTS[: EXPERIMENTS.index("1.")]
    for title in re.findall(".* samples.*", EXPERIMENTS):
        table += f"{title}\n"
        dataset = range(int(re.search("[0-9]+ ", title)[0]))
        for rank in range(2):
            sampler = None if "no sampler" in title else sampler_class(dataset, 2, rank)
            loader = DataLoader(dataset, 4, sampler=sampler, drop_last="drop_last" in title)
            line = f"         rank {rank}"
            for epoch in range(2):
                if "set_epoch" in title:
                    sampler.set_epoch(epoch)
                batches = " ".join(str(batch.tolist()) for batch in loader)
                line += f"   {batches:26}"
            table += f"{line.rstrip()}\n"
    return table


class Lesson2Experiments(TestCase):
    def test_both_samplers_make_the_batches_that_the_readme_shows(self):
        self.assertIn(EXPERIMENTS, README)
        self.assertEqual(experiments(TorchSampler), EXPERIMENTS, "PyTorch's sampler")
        with self.assertWarns(UserWarning):  # Some experiments leave out set_epoch().
            self.assertEqual(experiments(ddp.DistributedSampler), EXPERIMENTS, "our sampler")


# ---- Lesson 3: a step (train_step)
# Every rank ends a step with the parameters of one process that had the whole batch, even if ranks
# have unequal numbers of labels and compute their shares in micro-batches. DDP alone averages the
# ranks' gradients, so that a label counts for more on a rank with few labels. To break it, replace
# `dist.get_world_size()` by 1 in train_step(). Then the parameters of rank 0 of 2 differ.
def plain_net():
    """Return a net without BatchNorm, the same in every process.

    One of its parameters is frozen, and so never has a gradient.
    """
    torch.manual_seed(0)
    first = nn.Conv1d(3, 8, 3, padding=1)
    first.bias.requires_grad_(False)
    return nn.Sequential(first, nn.ReLU(), nn.Conv1d(8, 3, 3, padding=1))


class Ragged(ddp.SyntheticDataset):
    """Signals of length 40. Of each, none, some or all labels are ignored: they are -100."""

    def __init__(self, num_samples):
        super().__init__(num_samples, length=40, seed=0)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        y[: index * 10 % 50] = -100
        return x, y


def whole_batch(dataset):
    """Return all samples of a dataset as one batch."""
    return default_collate([dataset[i] for i in range(len(dataset))])


def loss_and_accuracy(net, dataset):
    """Return the mean loss and the accuracy over all labels of a dataset, in plain PyTorch."""
    x, y = whole_batch(dataset)
    logits = net(x)
    accuracy = (logits.argmax(1) == y).sum() / (y != -100).sum()
    return torch.stack([F.cross_entropy(logits, y), accuracy])


def share(sequence):
    """Return this rank's share of a sequence: every W-th item."""
    return sequence[dist.get_rank() :: dist.get_world_size()]


def step_on_rank(device, x, y, micro_batch_size):
    """Make a step on this rank's share of a batch: return the parameters, and the job's sums."""
    net = plain_net().to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1)  # Adam would hide a wrong factor.
    sums = ddp.train_step(model, optimizer, (share(x), share(y)), micro_batch_size)
    return net.state_dict(), sums


class Lesson3Step(TestCase):
    def test_on_any_number_of_ranks_a_step_is_that_of_one_process_with_the_whole_batch(self):
        net = plain_net()
        means = loss_and_accuracy(net, Ragged(12))
        means[0].backward()
        torch.optim.SGD(net.parameters(), lr=1).step()
        x, y = whole_batch(Ragged(12))

        for world_size, micro_batch_size in ((1, 5), (2, 6), (2, 4), (3, 1), (4, 3), (4, 2)):
            ranks = on_ranks(world_size, step_on_rank, x, y, micro_batch_size)
            for rank, (parameters, sums) in enumerate(ranks):
                what = f"rank {rank} of {world_size} with micro-batches of {micro_batch_size}"
                assert_close(parameters, net.state_dict(), f"the parameters of {what}")
                assert_close(sums[1:] / sums[0], means, f"the means of {what}")

        [(parameters, _)] = on_ranks(1, step_on_rank, x, torch.full_like(y, -100), 12)
        assert_close(parameters, plain_net().state_dict(), "the parameters after no label")


# ---- Lesson 4: evaluation (evaluate)
# Loss and accuracy are those of one process with all samples, also if the shares of the ranks are
# unequal (25 samples), and if some ranks have no sample (2 samples on 4 ranks). PyTorch's sampler
# would repeat samples. To break it, leave out `dist.all_reduce(total)` in evaluate(). Then the
# means of rank 0 of 2 differ: they are those of its own samples.
def net_with_batch_norm():
    """Return a net that computes something else in training than in evaluation."""
    return nn.Sequential(nn.BatchNorm1d(3), plain_net())


def evaluation_on_rank(device, num_samples):
    """Return the means of evaluate() on this rank."""
    net = net_with_batch_norm().to(device)
    net[0].running_mean += dist.get_rank()  # Under --local-bn each rank has other statistics.
    loader = DataLoader(Ragged(num_samples), 4, sampler=share(range(num_samples)))
    return torch.tensor(ddp.evaluate(net, loader))


class Lesson4Evaluation(TestCase):
    def test_on_any_number_of_ranks_the_means_are_those_of_one_process(self):
        for world_size, num_samples in ((1, 25), (2, 25), (3, 25), (4, 25), (4, 2)):
            expected = loss_and_accuracy(net_with_batch_norm().eval(), Ragged(num_samples))

            for rank, means in enumerate(on_ranks(world_size, evaluation_on_rank, num_samples)):
                what = f"the means of rank {rank} of {world_size} over {num_samples} samples"
                assert_close(means, expected, what)


# ---- Lesson 5: BatchNorm over the job (convert_batch_norm)
# On any number of ranks, a BatchNorm layer that convert_batch_norm() has changed does what
# PyTorch's layer does in one process with the samples of all ranks, even if the ranks have
# unequally many. To break it, replace `backward = forward` in SumOverRanks by
# `backward = staticmethod(lambda ctx, gradient: gradient)`. Then the gradients of x differ on 2
# ranks, and the outputs do not. (On GPUs the layers become PyTorch's own nn.SyncBatchNorm.)
def batch_norm_on_rank(device, layer, convert, x, weights):
    """Run a layer on this rank's samples: return everything that it computes, by name."""
    layer = copy.deepcopy(layer).to(device)  # What on_ranks() passes lies in shared memory.
    if convert:
        ddp.convert_batch_norm(layer)
    x = share(x).to(device).requires_grad_()
    output = layer(x)
    (output * share(weights).to(device)).sum().backward()
    computed = {"output": output, "gradient of x": x.grad}
    for name, parameter in layer.named_parameters():
        dist.all_reduce(parameter.grad)
        computed[f"gradient of the {name}"] = parameter.grad
    return computed | dict(layer.named_buffers()) | {"output in evaluation": layer.eval()(x)}


class Lesson5BatchNorm(TestCase):
    def test_outputs_gradients_and_statistics_are_those_of_one_process(self):
        x, weights = torch.randn(11, 3, 2, 2), torch.randn(11, 3, 2, 2)
        layer = nn.BatchNorm2d(3, eps=0.01, momentum=0.3)
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
        [expected] = on_ranks(1, batch_norm_on_rank, layer, False, x, weights)

        for world_size in (1, 2, 3, 4):
            ranks = on_ranks(world_size, batch_norm_on_rank, layer, True, x, weights)
            for rank, computed in enumerate(ranks):
                for name, value in expected.items():
                    if value.shape == x.shape:
                        value = value[rank::world_size]
                    assert_close(computed[name], value, f"{name} of rank {rank} of {world_size}")


# ---- Lesson 6: the number of processes, and stops (train)
# A job with augmentation, a warm-up, clipping, two param groups and uneven labels ends with the
# parameters of a loop in plain PyTorch: on any number of processes, in micro-batches, with loader
# workers, and if it is stopped and goes on with another number of processes. To break it, leave out
# `optimizer.load_state_dict` in resume(). Then the net of the jobs that were stopped differs.
OPTIONS = "--epochs 2 --global-batch-size 12 --lr 0.2 --clip-grad-norm 0.3 --seed 5"


class Augmented(Ragged):
    """Signals of Ragged, scaled by random numbers from PyTorch, NumPy and Python."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * (torch.rand(()).item() + np.random.rand() + random.random()), y


def make_augmented_task(args, device):
    """Return the task of this lesson. With micro-batches the net has no BatchNorm."""
    net = plain_net() if args.micro_batch_size else ddp.ConvNet()
    first, *others = net.to(device).parameters()
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": others}]
    return Augmented(43), Ragged(10), net, torch.optim.SGD(groups, momentum=0.9)


def warm_up(args, epochs_done):
    """Return the learning rate, which grows during the first epoch."""
    return args.lr * min(1, epochs_done + 0.1)


def plain_loop(args, device):
    """In place of train(), on one rank: train in plain PyTorch on the items of such a job."""
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = make_augmented_task(args, device)
    sampler = TorchSampler(train_set, seed=args.seed)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for begin in range(0, 36, 12):  # The last 7 of 43 samples do not fill a global batch.
            samples = []
            for index in order[begin : begin + 12]:
                ddp.seed_generators(args.seed, epoch, index)
                samples.append(train_set[index])
            x, y = default_collate(samples)
            F.cross_entropy(net(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = warm_up(args, epoch + begin / 43)
            optimizer.step()
            optimizer.zero_grad()
    torch.save({"net": net.state_dict()}, args.checkpoint)


class Lesson6NumberOfProcesses(TestCase):
    REPLACEMENTS = {"make_task": make_augmented_task, "learning_rate": warm_up}

    def test_on_any_number_of_processes_and_with_stops_a_job_ends_as_a_plain_loop_does(self):
        unstopped = [[(world_size, None)] for world_size in (1, 2, 3, 4)]
        # Four ranks make two steps, three ranks the next two, and two ranks the last two.
        stopped = [(4, 0.5), (3, 1.2), (2, None)]
        for option, *jobs in (
            ("--micro-batch-size 2", *unstopped, stopped),
            ("--num-workers 2", [(2, 0.5), (1, None)]),
            ("", *unstopped, stopped),
        ):
            options = f"{OPTIONS} {option}"
            expected = net_after(options, (1, None), train=plain_loop)
            for runs in jobs:
                net = net_after(options, *runs, **self.REPLACEMENTS)
                assert_close(net, expected, f"the net of a job {option} with the runs {runs}")

    def test_on_two_processes_a_stopped_job_ends_with_the_bits_of_one_that_was_not(self):
        expected = net_after(OPTIONS, (2, None), **self.REPLACEMENTS)

        net = net_after(OPTIONS, (2, 0.5), (2, 1.2), (2, None), **self.REPLACEMENTS)

        tolerance = 1e-3 if GPUS >= 2 else 0  # Whether GPUs give the same bits is untried.
        assert_close(net, expected, "the net", tolerance)


# ------------------------------------------------------------------------------------------------
# Above is what data-parallel training guarantees. Here are the helpers.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])  # for programs and ranks
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or torchrun's restarts may hang
# mp.start_processes() would log each rank that it ends because another rank has failed.
logging.getLogger("torch.multiprocessing.spawn").setLevel("ERROR")
SMALL = "--num-samples 48 --length 64 --epochs 2 --global-batch-size 12"  # four steps an epoch
TORCHRUN = "-m torch.distributed.run --local-addr=127.0.0.1 --standalone --nproc-per-node=2"


def be_rank(rank, world_size, folder, options, replacements):
    """Be one rank of a job: run main() as if torchrun had started this process."""
    mp.set_start_method("fork", force=True)  # Loader workers start fastest so.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    for name, number in (("WORLD_SIZE", world_size), ("RANK", rank)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(number)
    # The ranks find each other by a file, because a port could be taken.
    run_rank = functools.partial(ddp.run_rank, init_method=f"file://{folder}/store")
    vars(ddp).update(replacements, run_rank=run_rank)
    sys.argv = ["ddp_reference.py", *shlex.split(options)]
    with open(f"{folder}/{rank}", "w") as out, contextlib.redirect_stdout(out):
        ddp.main()


def run_job(world_size, options, **replacements):
    """Run a job on so many ranks: return what each rank printed.

    replacements: make_task=make_own_task puts make_own_task, which stands at the top level of a
    file, in the place of ddp_reference.make_task. If a rank raises, the others are ended, and this
    function raises mp.ProcessRaisedException.
    """
    # The ranks are forked from a process that has imported what takes long. torch._dynamo is what
    # the first optimizer of a process would import.
    mp.set_forkserver_preload(["ddp_reference", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = world_size, folder, options, replacements
        mp.start_processes(be_rank, arguments, world_size, start_method="forkserver")
        return [pathlib.Path(folder, str(rank)).read_text() for rank in range(world_size)]


def save_result(folder, function, arguments, args, device):
    """In place of train(): call a function and save its result."""
    torch.save(function(device, *arguments), f"{folder}/{dist.get_rank()}")


def on_ranks(world_size, function, *arguments):
    """Call function(device, *arguments) on each rank of a new process group: return the results."""
    with tempfile.TemporaryDirectory() as folder:
        train = functools.partial(save_result, folder, function, arguments)
        run_job(world_size, "", train=train)
        return [torch.load(f"{folder}/{rank}", map_location="cpu") for rank in range(world_size)]


def stop_at(epochs, learning_rate, args, epochs_done):
    """In place of learning_rate(): end this rank as a kill would, when so many epochs are done."""
    if epochs and epochs_done >= epochs:
        os._exit(0)
    return learning_rate(args, epochs_done)


def net_after(options, *runs, learning_rate=ddp.learning_rate, **replacements):
    """Run a job in one or more runs (world_size, epochs until it is stopped): return its net."""
    with tempfile.TemporaryDirectory() as folder:
        for world_size, epochs in runs:
            replacements["learning_rate"] = functools.partial(stop_at, epochs, learning_rate)
            checkpoint = f"--checkpoint {folder}/ck --checkpoint-every 1"
            run_job(world_size, f"{checkpoint} {options}", **replacements)
        return torch.load(f"{folder}/ck", map_location="cpu")["net"]


def assert_close(actual, expected, what, tolerance=2e-5):
    """Assert that numbers or tensors are equal, by default up to the rounding of float32."""
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance,
        atol=tolerance,
        check_dtype=False,
        msg=lambda difference: f"{what} should be another: {difference}",
    )


# ---- Chapter 2: the sampler
class Chapter2Sampler(TestCase):
    def test_an_order_is_no_python_list_of_all_indices(self):
        indices = iter(ddp.DistributedSampler(range(10**6), 1, 0))
        tracemalloc.start()  # It sees Python's own memory, as of a list of 36 MB.
        next(indices)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        self.assertLess(peak, 10**5)

    def test_a_second_pass_over_the_same_order_warns_to_call_set_epoch(self):
        sampler = ddp.DistributedSampler(range(5), 2, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(sampler)

        with self.assertWarnsRegex(UserWarning, r"call set_epoch\(epoch\)"):
            list(sampler)


# ---- Chapters 3 and 4: the step and the loop
class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of PyTorch's operators by their names."""

    counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **kwargs or {})


def count_operators(args, device, train=ddp.train):
    """In place of train(): print how often collectives are called, and waits for the device."""
    with Operators():
        train(args, device)
    for name, count in Operators.counts.items():
        if "c10d" in name or "_local_scalar_dense" in name:  # what .item() calls
            print(f"{name}={count}")


def print_random_number(output, y, batch_sums=ddp.batch_sums):
    """In place of batch_sums(): print a random number, as dropout would draw it."""
    if output.requires_grad:  # not in evaluation
        print("drawn", torch.rand(1, device=y.device).item(), np.random.rand(), random.random())
    return batch_sums(output, y)


def make_plain_task(args, device):
    """Return a task with uneven labels, whose net is the same in training and in evaluation."""
    net = plain_net().to(device)
    return Ragged(48), Ragged(25), net, torch.optim.Adam(net.parameters())


class Clock:
    """A clock that is two seconds later at each look."""

    perf_counter = itertools.count(0, 2).__next__


class Chapter4Loop(TestCase):
    def test_a_step_has_two_collectives_and_never_waits_by_item(self):
        counts = []
        for global_batch_size in (6, 12):  # 7 steps, and 3
            options = (
                f"--global-batch-size {global_batch_size} --epochs 1 --local-bn --num-workers 1"
            )
            replacements = {"train": count_operators, "make_task": make_augmented_task}
            out, _ = run_job(2, f"{options} --clip-grad-norm 1", **replacements)
            counts.append({name: int(count) for name, count in re.findall(r"(\S+)=(\d+)", out)})

        added = {name: counts[0][name] - counts[1][name] for name in counts[0]}
        self.assertEqual(added.pop("c10d.allreduce_.default"), 8, "gradients and sums, in 4 steps")
        self.assertEqual(set(added.values()), {0}, added)

    def test_ranks_steps_and_micro_batches_draw_random_numbers_of_their_own(self):
        options = f"{SMALL} --micro-batch-size 3 --num-workers 1"
        ranks = run_job(2, options, batch_sums=print_random_number)

        drawn = re.findall(r"drawn (\S+) (\S+) (\S+)", "".join(ranks))
        for numbers in zip(*drawn, strict=True):  # of PyTorch, NumPy and Python
            self.assertEqual(len(set(numbers)), 32, "on 2 ranks in 8 steps of 2 micro-batches")

    def test_each_option_of_training_changes_the_net(self):
        options = "--epochs 1|--global-batch-size 2|--micro-batch-size 2|--lr 0.1|--amp|--local-bn"
        options += "|--clip-grad-norm 0.01|--seed 1|--num-samples 60|--length 65"
        unchanged = net_after(SMALL, (2, None))

        for option in options.split("|"):
            net = net_after(f"{SMALL} {option}", (2, None))
            self.assertFalse(torch.equal(net["0.weight"], unchanged["0.weight"]), option)

    def test_all_printed_numbers_are_those_of_the_job_also_after_a_stop(self):
        # With a learning rate of 0 the net stays what it is, and its numbers are known.
        loss, accuracy = loss_and_accuracy(plain_net(), Ragged(48))
        val_loss, val_accuracy = loss_and_accuracy(plain_net(), Ragged(25))
        means = f"loss {loss:.4f} accuracy {accuracy:.4f}"
        means += f" | val_loss {val_loss:.4f} val_accuracy {val_accuracy:.4f}"
        options = f"{SMALL} --lr 0 --log-every 4 --checkpoint {FOLDER}/numbers --checkpoint-every 2"
        replacements = {"make_task": make_plain_task, "time": Clock}
        stop = functools.partial(stop_at, 0.7, ddp.learning_rate)
        run_job(3, options, **replacements, learning_rate=stop)

        resumed, *others = run_job(3, options, **replacements)
        finished, *_ = run_job(3, options, **replacements)

        lines = [
            f"resuming from {FOLDER}/numbers: epoch 0, 24 samples read",
            f"epoch 0 | 48/48 samples | loss {loss:.4f}",
            f"epoch 0 | {means} | 12.0 samples/s",
            f"epoch 1 | 48/48 samples | loss {loss:.4f}",
            f"epoch 1 | {means} | 24.0 samples/s",
        ]
        self.assertEqual(resumed.splitlines()[1:], lines)
        self.assertEqual(others, ["", ""], "only rank 0 prints")
        self.assertIn("nothing is left to do", finished)


# ---- Chapter 5: the processes
PROGRAM = """
import ddp_reference, test_ddp_reference
ddp_reference.learning_rate = test_ddp_reference.{}
if __name__ == "__main__":
    ddp_reference.main()
"""


def start(command, **environ):
    """Start a Python program, with its output in pipes."""
    # In a job of the shell, started with &, Ctrl-C is ignored. The program would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = subprocess.Popen(
        [sys.executable, *shlex.split(command)],
        cwd=FOLDER,
        env=os.environ | environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    unittest.addModuleCleanup(program.kill)  # in case no test has waited for its end
    return program


def start_job(options, learning_rate, launcher=""):
    """Start a small job with a learning_rate() of this file, which stops or disturbs the job."""
    program = pathlib.Path(FOLDER, f"{learning_rate}.py")
    program.write_text(PROGRAM.format(learning_rate))
    return start(f"{launcher} {program} {SMALL} {options}")


def finish(program, status=0):
    """Return (stdout, stderr) of a program when all processes that hold its pipes have ended."""
    out, err = program.communicate(timeout=120)
    assert program.returncode == status, f"status {program.returncode}: {err}"
    return out, err


def kill_rank_0_once(args, epochs_done):
    """Rank 0 is killed in the second epoch, but not after a restart by torchrun."""
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_start and epochs_done > 1.3 and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return args.lr


class Chapter5Processes(TestCase):
    @classmethod
    def setUpClass(cls):
        # These programs run side by side.
        cls.temporary = tempfile.mkdtemp(dir=FOLDER)
        cls.main_job = start(f"{FILE} --length 300", TMPDIR=cls.temporary)
        cls.failing = start(f"{FILE} --nproc-per-node 1 --shards none.tar --val-shards none.tar")
        options = f"--checkpoint {FOLDER}/restarted --checkpoint-every 1"
        cls.restarted = start_job(options, "kill_rank_0_once", f"{TORCHRUN} --max-restarts=1")

    def test_what_cannot_work_is_refused_in_one_line_with_status_2(self):
        for options, environ, words in (
            ("--unknown", {}, "unrecognized arguments: --unknown"),
            ("--nproc-per-node 7", {}, "equal shares need 238 or 245"),
            ("--nproc-per-node 7 --global-batch-size 3", {}, "equal shares need 7 or 14"),
            ("--global-batch-size 0", {}, "equal shares need"),
            ("--shards a.tar", {}, "--shards and --val-shards go together"),
            ("--checkpoint-every 1", {}, "--checkpoint-every needs --checkpoint"),
            ("--checkpoint=", {}, "--checkpoint is a folder"),
            ("--checkpoint /none/ck", {}, "its folder is missing"),
            ("", {"RANK": "0"}, "torchrun"),
            ("", {"SLURM_STEP_NUM_TASKS": "2"}, "torchrun"),
        ):
            sys.argv = ["ddp_reference.py", *options.split()]
            with (
                mock.patch.dict(os.environ, environ),
                contextlib.redirect_stderr(io.StringIO()) as err,
                self.assertRaisesRegex(SystemExit, "2"),
            ):
                ddp.main()
            self.assertRegex(err.getvalue(), f"^.*: error: .*{words}.*\n$")

    def test_the_main_job_learns_and_leaves_no_file(self):
        out, _ = finish(self.main_job)

        kind = f"nccl, world size {GPUS}, cuda" if GPUS else "gloo, world size 2, cpu"
        first = f"ddp on {kind}, global batch size 240, torch {torch.__version__}\n"
        self.assertTrue(out.startswith(first), out)
        self.assertEqual(out.count("\n"), 7, "the first line, and six epochs")
        self.assertRegex(out, r"epoch 5 .* val_accuracy 0\.9")  # Guessing would be 0.333.
        self.assertEqual(list(pathlib.Path(self.temporary).glob("tmp*")), [])

    def test_a_rank_that_raises_ends_the_job_with_its_message(self):
        _, err = finish(self.failing, status=1)

        self.assertRegex(err, r"FileNotFoundError: .* No such file or directory: 'none.tar'\s*$")

    def test_torchrun_restarts_a_job_of_which_a_rank_was_killed(self):
        out, _ = finish(self.restarted)

        self.assertIn("epoch 1, 24 samples read", out)
        net = torch.load(f"{FOLDER}/restarted", map_location="cpu")["net"]
        assert_close(net, net_after(SMALL, (2, None)), "the net", 1e-3)


# ---- Chapter 6: checkpoints
def train_with_a_file_of_rank_0(args, device, train=ddp.train):
    """In place of train(): only rank 0 finds the checkpoint."""
    args.checkpoint += str(dist.get_rank() or "")
    train(args, device)


class Chapter6Checkpoints(TestCase):
    def test_a_job_that_cannot_go_on_or_save_leaves_the_checkpoint_as_it_was(self):
        path = pathlib.Path(FOLDER, "ck")
        job = f"{SMALL} --checkpoint {path}"
        run_job(1, job)
        whole = path.read_bytes()
        code = io.BytesIO()
        torch.save(print, code)
        os.symlink("/dev/full", f"{path}.tmp")  # No byte can be written to it.
        for content, options, replacements, words in (
            (whole[:1000], "", {}, "ck is damaged or of another job: RuntimeError"),
            (code.getvalue(), "", {}, "ck is damaged or of another job: UnpicklingError"),
            (whole, "--seed 99", {}, "args.seed=0"),
            (whole, "--num-samples 60", {}, r"len\(train_set\)=48"),
            (whole, "--num-samples 6", {}, "larger than the training set"),
            (whole, "--global-batch-size 24", {}, "batch_size=12"),
            (whole, "", {"make_task": make_augmented_task}, "Adam"),
            (whole, "", {"make_task": make_plain_task}, "Missing key"),
            (whole, "", {"train": train_with_a_file_of_rank_0}, "all machines need the file"),
            (
                whole,
                "--epochs 3 --lr inf",
                {},
                "a parameter is not finite, so .*ck was not written",
            ),
            (whole, "--epochs 3", {}, "No space left|PytorchStreamWriter failed"),
        ):
            path.write_bytes(content)

            with self.assertRaisesRegex(mp.ProcessRaisedException, words):
                run_job(2, f"{job} {options}", **replacements)
            self.assertEqual(path.read_bytes(), content)


# ---- Chapter 9: hangs, and processes that are left over
def sleep_on_rank_0(args, epochs_done):
    """Rank 0 says how many threads it may have and on which network it listens, and sleeps."""
    if dist.get_rank() == 0:
        print(os.environ["OMP_NUM_THREADS"], "threads on", os.environ["GLOO_SOCKET_IFNAME"])
        signal.pause()


class Chapter9Hangs(TestCase):
    @classmethod
    def setUpClass(cls):
        # These programs run side by side.
        cls.hanging = start_job("--nproc-per-node 2 --timeout 3", "sleep_on_rank_0")
        endless = f"{FILE} {SMALL} --epochs 100000 --log-every 1 --nproc-per-node 1"
        cls.launchers = [start(endless), start(f"{endless} --num-workers 2")]

    def test_ranks_and_loader_workers_end_when_the_launcher_alone_is_ended(self):
        for launcher, (number, status) in zip(
            self.launchers, ((signal.SIGINT, 130), (signal.SIGKILL, -9))
        ):
            while not launcher.stdout.readline().startswith("epoch"):
                self.assertIsNone(launcher.poll())

            launcher.send_signal(number)

            finish(launcher, status)

    def test_when_a_rank_hangs_all_ranks_print_their_stacks_and_the_job_ends(self):
        out, err = finish(self.hanging, status=1)

        threads = os.environ.get("OMP_NUM_THREADS", torch.get_num_threads() // 2 or 1)
        self.assertIn(f"\n{threads} threads on lo", out)
        first, second = err.split("Timeout (")[1:]  # Rank 1 of 2 prints 5 / 2 seconds later.
        self.assertRegex(first, r"^0:00:03\)!\n(?s:.*) in sleep_on_rank_0\n")
        self.assertRegex(second, r"^0:00:05\.500000\)!\n(?s:.*) in train_step\n")


# ---- Chapter 10: tar shards
def write_shard(path, members):
    """Write arrays into a tar file, under these names."""
    with tarfile.open(path, "w") as tar:
        for name, array in members.items():
            np.save(f"{FOLDER}/member.npy", array)
            tar.add(f"{FOLDER}/member.npy", name)


class Chapter10Shards(TestCase):
    def test_training_from_shards_is_training_from_their_samples(self):
        dataset = ddp.SyntheticDataset(48, 64, seed=0)
        shards = f"{FOLDER}/0.tar", f"{FOLDER}/1.tar"
        for shard, path in enumerate(shards):
            members = {}
            for index in range(24 * shard, 24 * shard + 24):
                x, y = dataset[index]
                name = "long/" * 30 + f"v1.0/{index}"
                members |= {f"{name}.y.npy": y, f"{name}.json": 0, f"{name}.x.npy": x}
            write_shard(path, members)

        options = f"{SMALL} --shards {' '.join(shards)} --val-shards {shards[0]}"
        net = net_after(options, (2, None))

        assert_close(net, net_after(SMALL, (2, None)), "the net")

    def test_a_damaged_shard_is_refused_by_its_name_and_nothing_is_unpickled(self):
        path = pathlib.Path(FOLDER, "damaged.tar")
        write_shard(path, {"a.x.npy": 0, "a.y.npy": 0, "b.x.npy": 0, "b.y.npy": 0})
        whole = path.read_bytes()
        damaged = [whole[:length] for length in range(0, len(whole.rstrip(b"\0")), 512)]
        for place in (0, 124, 148, 1024):  # name, size and checksum of a header; the second one
            damaged.append(whole[:place] + b"?" + whole[place + 1 :])
        for content in damaged:
            path.write_bytes(content)
            with self.assertRaisesRegex(ValueError, "damaged.tar is damaged"):
                ddp.ShardDataset([path])

        for members, words in (
            ({"a.x.npy": 0}, "damaged.tar .* lacks a member: 'a.y.npy'"),
            ({"a.x.npy": np.array([{}]), "a.y.npy": 0}, "Object arrays cannot be loaded"),
        ):
            write_shard(path, members)
            with self.assertRaisesRegex(ValueError, words):
                ddp.ShardDataset([path])[0]


# ---- The README: what it shows is run
def programs():
    """Return the programs of the README by name. A diff makes one from another one."""
    texts = {"ddp_reference.py": (HERE / "ddp_reference.py").read_text()}
    for name, text in re.findall(r"(?ms)^```python (\S+)\n(.*?)^```", README):
        texts[name] = text
    for old_name, name, diff in re.findall(r"(?ms)^```diff (\S+) (\S+)\n(.*?)^```", README):
        text = texts[old_name]
        for hunk in re.split(r"(?m)^@@.*\n", diff):
            old = "".join(re.findall(r"(?m)^[ -](.*\n)", hunk))
            new = "".join(re.findall(r"(?m)^[ +](.*\n)", hunk))
            assert text.count(old) == 1 or not hunk, f"The README's diff shows other lines:\n{old}"
            text = text.replace(old, new)
        texts[name] = text
    return texts


def write_programs(folder):
    """Write the programs of the README into a folder, but not over a file that was changed."""
    for name, text in programs().items():
        path = pathlib.Path(folder, name)
        if name in ("ddp_reference.py", "exercises"):
            continue
        if path.exists() and path.read_text() != text:
            print(f"{name} is left as it is, because it differs from that of the README")
        else:
            path.write_text(text)
            print(f"wrote {name}")


def run_program(rank, world_size, folder, program, port):
    """Run a program of the README as one rank, as torchrun would."""
    if world_size > GPUS:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # The ranks need a GPU each.
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    for name, value in variables.items():
        os.environ[name] = str(value)
    os.environ |= {"MASTER_ADDR": "localhost", "NVIDIA_TF32_OVERRIDE": "0"}
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(program)


class TheReadme(TestCase):
    @classmethod
    def setUpClass(cls):
        with contextlib.redirect_stdout(io.StringIO()):
            write_programs(FOLDER)
        command = "my_job.py --epochs 2 --lr 0.1 --nproc-per-node"
        cls.jobs = [start(f"{command} {world_size}") for world_size in (1, 2)]

    def test_the_programs_for_one_and_many_processes_train_the_same(self):
        nets = []
        for name, world_size in (("one", 1), ("dp", 1), ("many", 2), ("better", 2)):
            with socket.create_server(("localhost", 0)) as server:
                port = server.getsockname()[1]
            arguments = world_size, FOLDER, f"{name}.py", port
            mp.start_processes(run_program, arguments, world_size, start_method="forkserver")
            nets.append(list(torch.load(f"{FOLDER}/model.pt", map_location="cpu").values()))

            assert_close(nets[-1], nets[0], f"the net of {name}.py")

    def test_the_example_job_prints_the_same_on_one_and_two_processes(self):
        lines = [re.findall("(?m)^epoch.*top5 .*(?= [|])", finish(job)[0]) for job in self.jobs]

        self.assertEqual(len(lines[0]), 2, "the lines of two epochs")
        self.assertEqual(*lines)


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`, or do what is named."""
    if sys.argv[1:] == ["programs"]:
        return write_programs(".")
    if sys.argv[1:] == ["experiments"]:
        for sampler_class in (TorchSampler, ddp.DistributedSampler):
            print(sampler_class.__module__, experiments(sampler_class))
        return None
    result = unittest.main(exit=False, verbosity=2).result
    failed = len(result.failures + result.errors)
    skipped = len(result.skipped)
    passed = max(0, result.testsRun - failed - skipped)  # More subtests may fail than tests run.
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0 or not passed)  # NAME in -k NAME may be mistyped.


if __name__ == "__main__":
    main()
