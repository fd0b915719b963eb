"""The guarantees of ddp_reference.py. The names of the tests are the list of them.

    bash run.sh test                 # all of them; also: python -m pytest test_ddp_reference.py
    bash run.sh test -k Lesson       # the classes or tests whose names hold this word
    bash run.sh test programs        # write the README's programs into the working directory

First come six lessons: what data-parallel training guarantees. Each compares what ranks do with an
oracle: with PyTorch's own sampler, one process that has the whole batch, or a loop in plain
PyTorch. Below the long line after Lesson 6 stand the helpers, and then all other tests: of options,
messages and faults, most of which have cost somebody a day.

on_ranks(3, function, *args) calls a function in each of three processes, which form a process
group, and returns the three results. The group is NCCL's, and each rank has a GPU, if there are
enough GPUs; otherwise it is gloo's, on the CPU. device() is the device of the calling rank.

Which tests watch over what (`bash run.sh test -k Lesson3 -k TheStep` runs both):

    DistributedSampler, DistributedBatchSampler     Lesson1, Lesson2, TheSampler
    train_step, run_micro_batch                     Lesson3, Lesson6, TheStep, TheDataParallel
    batch_sums                                      Lesson3, Lesson4, Lesson6
    evaluate                                        Lesson4, TheStep, TheJob
    convert_batch_norm, its layers                  Lesson5, Lesson6
    train, make_loaders, SeededItems                Lesson6, TheJob
    seed_generators                                 Lesson6, TheStep
    set_learning_rates, make_task, the data         TheJob, TheProcesses
    data_parallel                                   Lesson6, TheDataParallel, TheJob
    save_checkpoint, resume                         Lesson6, TheCheckpoint, TheJob
    run_rank, launch, watched, end_with_parent      TheProcesses
    watched: the alarm is set anew for each step    job_on_rank(), so all classes that run jobs
    ShardDataset, read_index, decode_npy            TheShards
    make_parser, parse_args                         TheCommandLine, TheJob
    the README's diffs, programs and exercises      TheReadme

The README quotes lines of the file. If you change such a line, TheReadme fails until you change it
in the README, too.

To add a test, write what a rank does as a function at the top level, call it with on_ranks(), and
put both into the section of this file that the table names. A job that fails or hangs is started
in TheProcesses. A new option of training goes into OPTIONS of Lesson 6 and into plain_loop(), or
into loss_and_sums() if it changes the loss: that tests it on any number of processes. It also goes
into the lists of options in TheJob (whose number of options grows) and in TheCommandLine.
"""

import contextlib
import copy
import datetime
import io
import itertools
import logging
import math
import os
import pathlib
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import unittest
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

GPUS = torch.cuda.device_count()
HERE = pathlib.Path(__file__).resolve().parent
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
README = (HERE / "README.md").read_text()
SOURCE = (HERE / "ddp_reference.py").read_text()
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for programs and the fork server
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or torchrun's restarts may hang
# mp.spawn() would log each rank that it ends because another rank has failed.
logging.getLogger("torch.multiprocessing.spawn").setLevel("ERROR")
SMALL = "--num-samples 44 --length 64 --epochs 2"  # An epoch has two steps of 22 samples.
TORCHRUN = "-m torch.distributed.run --local-addr=127.0.0.1 --standalone --nproc-per-node=2"
# These are the originals, for jobs in which functions of this file replace them.
batch_sums, set_learning_rates = ddp.batch_sums, ddp.set_learning_rates


# ---- Lesson 1: which samples a rank reads (DistributedSampler, DistributedBatchSampler)
# The ranks must divide the samples of an epoch among themselves. DistributedSampler gives each rank
# the indices that PyTorch's sampler gives it. DistributedBatchSampler deals out steps: a step has
# the same samples on any number of ranks, also when a job resumes in the middle of an epoch. To
# break the file, replace `begin + rank` by `begin` in DistributedBatchSampler. Then every rank
# reads the samples of rank 0, and the test of steps says that two lists differ.
class Lesson1Sampler(TestCase):
    def test_the_indices_are_those_of_pytorchs_sampler(self):
        cases = itertools.product(range(20), range(1, 8), (True, False), (True, False))
        # More than 2**16 samples: our permutation is of int32, PyTorch's of int64.
        large = 70000, 2, True, False
        for num_samples, num_replicas, shuffle, drop_last in [large, *cases]:
            for rank in range(num_replicas):
                # All arguments of the samplers in their order. The seed is 7.
                arguments = range(num_samples), num_replicas, rank, shuffle, 7, drop_last
                ours, torchs = ddp.DistributedSampler(*arguments), TorchSampler(*arguments)
                ours.set_epoch(5)
                torchs.set_epoch(5)

                self.assertEqual(list(ours), list(torchs))
                # Ours has the attributes of PyTorch's, and others: <= is the relation of subsets.
                self.assertLessEqual(vars(torchs).items(), vars(ours).items())

    def test_on_any_number_of_ranks_and_after_a_stop_the_steps_are_the_same(self):
        for num_samples, global_batch_size in ((100, 32), (27, 8), (11, 100)):
            dataset = range(num_samples)
            # PyTorch's sampler adds the epoch to the seed. So this is epoch 3 of seed 0.
            order = list(TorchSampler(dataset, 1, 0, seed=3))
            num_steps = math.ceil(num_samples / global_batch_size)
            steps = np.array_split(order, num_steps)  # nearly equal parts, the larger ones first
            for world_size, done in itertools.product((1, 2, 3, 5), range(num_steps)):
                samples_read = sum(map(len, steps[:done]))
                for rank in range(world_size):
                    sampler = ddp.DistributedSampler(dataset, world_size, rank)
                    batch_sampler = ddp.DistributedBatchSampler(sampler, global_batch_size)
                    batch_sampler.set_epoch(3, samples_read)

                    shares = [step[rank::world_size].tolist() for step in steps[done:]]
                    self.assertEqual(list(batch_sampler), shares)


# ---- Lesson 2: seven experiments (DistributedSampler)
# Two ranks read batches of 4 by a DataLoader, for two epochs. The title of an experiment names what
# is used: the number of samples, set_epoch(), the loader's drop_last. The README tells what each
# experiment teaches. The numbers are older than this project: a job on two GPUs had printed them,
# with PyTorch's sampler. Where set_epoch() is left out, our sampler warns. To break the file, leave
# out `% len(order)` in DistributedSampler. Then experiment 5, in which a sample is read twice, ends
# with an IndexError.
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


def table_line(sampler_class, title, rank):
    """Return a line of the table: the batches of a rank, from a loader with such a sampler."""
    dataset = range(int(re.search(r"(\d+) samples", title)[1]))
    sampler = None if "no sampler" in title else sampler_class(dataset, 2, rank)
    loader = DataLoader(dataset, 4, sampler=sampler, drop_last="drop_last" in title)
    epochs = []
    for epoch in range(2):
        if "set_epoch" in title:
            sampler.set_epoch(epoch)
        epochs.append(" ".join(str(batch.tolist()) for batch in loader))
    return f"         rank {rank}   {epochs[0]:28} {epochs[1]}".rstrip()


class Lesson2Experiments(TestCase):
    def test_both_samplers_make_the_batches_that_the_readme_shows(self):
        self.assertIn(EXPERIMENTS, README)
        # A title, and below it the lines of the two ranks
        for title, *lines in re.findall(r"(.*samples.*)\n(.*)\n(.*)\n", EXPERIMENTS):
            for sampler_class in (TorchSampler, ddp.DistributedSampler):
                with self.subTest(title, sampler=sampler_class.__module__):
                    printed = [table_line(sampler_class, title, rank) for rank in range(2)]
                    self.assertEqual(printed, lines)


# ---- Lesson 3: a step (train_step)
# Every rank ends a step with the parameters of one process that had the whole batch, even if ranks
# have unequal numbers of labels and compute their shares in micro-batches. DDP alone averages the
# ranks' gradients, so that a label counts for more on a rank with few labels. To break the file,
# replace `dist.get_world_size()` by 1 in train_step(). Then the parameters differ from those of one
# process: the ranks still agree with each other, but all of them have made too small a step. After
# the change of the README's second review exercise, a label counts differently on each rank.
def plain_net():
    """Return a net without BatchNorm, the same in every process.

    One of its parameters is frozen, and so never has a gradient.
    """
    torch.manual_seed(0)
    first, second = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 3, 3, padding=1)
    first.bias.requires_grad_(False)
    return nn.Sequential(first, nn.ReLU(), second)


class Ragged(ddp.SyntheticDataset):
    """Signals; of each, none, some or all labels are ignored. Ragged(12, 40): 12 signals of 40."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        # cross_entropy() ignores -100. Of 40 labels it ignores 0, 17 and 34 in the first three
        # signals, and all in the next five.
        y[: index * 17 % 120] = -100
        return x, y


def ragged_batch(num_samples):
    """Return (x, y): so many signals of Ragged as one batch."""
    return default_collate(list(Ragged(num_samples, 40)))


def loss_and_sums(net, x, y):
    """Return the mean loss of a batch, and the sums that train_step() must return for it."""
    logits = net(x)
    loss = F.cross_entropy(logits, y)
    num_correct = (logits.argmax(1) == y).sum()
    num_labels = (y >= 0).sum()
    sums = torch.stack([loss * num_labels, num_correct, num_labels])
    return loss, sums.detach().double()


def step_on_rank(x, y, num_micro_batches):
    """Make a step on this rank's share of a batch: return the parameters, and the job's sums."""
    net = plain_net().to(device())
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1)  # Adam would hide a wrong factor.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    xs = x[rank::world_size].tensor_split(num_micro_batches)
    ys = y[rank::world_size].tensor_split(num_micro_batches)
    # math.inf is clip_grad_norm. It clips nothing, but TheStep checks that clipping does not wait.
    sums = ddp.train_step(model, optimizer, list(zip(xs, ys)), (0,), math.inf)
    return net.state_dict(), sums


class Lesson3Step(TestCase):
    def test_on_any_number_of_ranks_a_step_is_that_of_one_process_with_the_whole_batch(self):
        net = plain_net()
        x, y = ragged_batch(12)
        loss, sums = loss_and_sums(net, x, y)
        loss.backward()
        torch.optim.SGD(net.parameters(), lr=1).step()

        for world_size, num_micro_batches in ((1, 3), (2, 2), (3, 1), (3, 4), (5, 2)):
            for step in on_ranks(world_size, step_on_rank, x, y, num_micro_batches):
                assert_close(step, (net.state_dict(), sums))


# ---- Lesson 4: evaluation (evaluate)
# Loss and accuracy are those of one process with all samples, also if the shares of the ranks are
# unequal (25 samples), and if some ranks have no sample (2 samples on 3 ranks). PyTorch's sampler
# would repeat samples. evaluate() first gives every rank the buffers of rank 0, because BatchNorm's
# statistics may differ. To break the file, leave out `dist.all_reduce(sums)` in evaluate(). Then
# each rank has numbers of its own.
def net_with_batch_norm():
    """Return a net that computes something else in training than in evaluation."""
    return nn.Sequential(nn.BatchNorm1d(3), plain_net())


def evaluation_on_rank(num_samples):
    """Return [loss, accuracy] as evaluate() gives them on this rank."""
    net = net_with_batch_norm().to(device())
    net[0].running_mean += dist.get_rank()  # Under --local-bn each rank has other statistics.
    share = range(dist.get_rank(), num_samples, dist.get_world_size())
    loader = DataLoader(Ragged(num_samples, 40), batch_size=4, sampler=share)
    return ddp.evaluate(net, loader, device())


def evaluation_of_one_process(net, num_samples):
    """Return [loss, accuracy] over all samples as one batch, in plain PyTorch."""
    _, sums = loss_and_sums(net, *ragged_batch(num_samples))
    return (sums[:2] / sums[2]).tolist()


class Lesson4Evaluation(TestCase):
    def test_on_any_number_of_ranks_loss_and_accuracy_are_those_of_one_process(self):
        for world_size, num_samples in itertools.product((1, 2, 3, 5), (25, 2)):
            expected = evaluation_of_one_process(net_with_batch_norm().eval(), num_samples)

            for numbers in on_ranks(world_size, evaluation_on_rank, num_samples):
                assert_close(numbers, expected)


# ---- Lesson 5: BatchNorm over the job (convert_batch_norm)
# On any number of ranks, a BatchNorm layer that convert_batch_norm() has changed does what
# PyTorch's layer does in one process with the samples of all ranks. To break the file, replace
# `backward = forward` in SumOverRanks by `backward = staticmethod(lambda ctx, gradient: gradient)`.
# Then the gradients of x differ, and the outputs do not. (On GPUs the layers become PyTorch's
# nn.SyncBatchNorm, which this change does not touch.)
def run_layers(convert, layers, x, gradient):
    """Run layers forward and backward on this rank's part of x and of the gradient of the output.

    convert: whether convert_batch_norm() changes the layers. A part is of consecutive samples, so
    that torch.cat() joins the outputs of the ranks. Returns (output, gradient of x, state). The
    state has the gradients of the parameters, summed up over the ranks, then the buffers, and the
    output for zeros in eval mode.
    """
    layers = copy.deepcopy(layers).to(device())  # What on_ranks() passes lies in shared memory.
    if convert:
        ddp.convert_batch_norm(layers)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = x.tensor_split(world_size)[rank].to(device()).requires_grad_()
    layers(2 * x)  # An earlier batch: with momentum=None, statistics are averages over batches.
    output = layers(x)
    output.backward(gradient.tensor_split(world_size)[rank].to(device()))
    state = [parameter.grad for parameter in layers.parameters()]
    for parameter_gradient in state:
        dist.all_reduce(parameter_gradient)
    state += [*layers.buffers(), layers.eval()(0 * x[:1])]
    return output, x.grad, state


class Lesson5BatchNorm(TestCase):
    def test_outputs_gradients_and_statistics_are_those_of_one_process(self):
        x, gradient = torch.randn(11, 3, 2, 2), torch.randn(11, 12)
        layers = nn.Sequential(
            nn.BatchNorm2d(3, eps=0.01, momentum=0.3),
            nn.Flatten(),
            # Without weights, but not on GPUs: nn.SyncBatchNorm without weights is untried.
            nn.BatchNorm1d(12, affine=GPUS > 0, momentum=None),
        )
        [(output, x_gradient, state)] = on_ranks(1, run_layers, False, layers, x, gradient)

        for world_size in (1, 2, 3, 5):
            ranks = on_ranks(world_size, run_layers, True, layers, x, gradient)
            outputs, x_gradients, states = zip(*ranks)
            assert_close(torch.cat(outputs), output)
            assert_close(torch.cat(x_gradients), x_gradient)
            for rank_state in states:
                assert_close(rank_state, state)


# ---- Lesson 6: the number of processes, and stops (train)
# A job with augmentation, a warm-up, clipping, two param groups and uneven labels ends with the
# parameters of a loop in plain PyTorch: on any number of processes, in micro-batches, with loader
# workers, and if it is stopped and goes on with another number of processes. Here it is stopped by
# an exception between two steps; in TheProcesses a job is killed. To break the file, leave out
# `optimizer.load_state_dict` in resume(). Then the jobs that were stopped differ.
class Augmented(Ragged):
    """Signals of Ragged, scaled by random numbers from PyTorch, NumPy and Python."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        scale = torch.rand(()).item() + np.random.rand() + random.random()
        return x * scale, y


def set_warm_up(optimizer, args, epochs):
    """Warm up during the first epoch. The second param group has half the learning rate."""
    for i, group in enumerate(optimizer.param_groups, start=1):
        group["lr"] = args.lr * min(epochs + 0.1, 1) / i


def make_augmented_task(args, device):
    """Return the task of this lesson. With micro-batches the net has no BatchNorm."""
    net = plain_net() if args.micro_batch_size else ddp.ConvNet()
    first, *others = net.to(device).parameters()
    groups = [{"params": [first]}, {"params": others}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return Augmented(43, 40), Ragged(10, 40), net, optimizer


def plain_loop(args):
    """Train in one process, seeding each item as a job does: return the parameters and buffers."""
    ddp.seed_generators(args.seed)
    train_set, _, net, optimizer = make_augmented_task(args, "cpu")
    sampler = TorchSampler(train_set, 1, 0, seed=args.seed)
    num_steps = math.ceil(len(train_set) / args.global_batch_size)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        samples_read = 0
        for indices in np.array_split(list(sampler), num_steps):
            samples = []
            for index in indices.tolist():
                ddp.seed_generators(args.seed, epoch, index)
                samples.append(train_set[index])
            x, y = default_collate(samples)
            loss, _ = loss_and_sums(net, x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad_norm)
            set_warm_up(optimizer, args, epoch + samples_read / len(train_set))
            optimizer.step()
            optimizer.zero_grad()
            samples_read += len(indices)
    return net.state_dict()


class Lesson6NumberOfProcesses(TestCase):
    # The task has 43 samples, so an epoch has four steps.
    OPTIONS = "--epochs 2 --global-batch-size 12 --lr 0.2 --clip-grad-norm 0.3 --seed 7"
    REPLACEMENTS = {"make_task": make_augmented_task, "set_learning_rates": set_warm_up}

    def test_on_any_number_of_processes_and_with_stops_a_job_ends_as_a_plain_loop_does(self):
        # A job is a list of runs (world_size, stop_at).
        unstopped_jobs = [[(world_size, None)] for world_size in (1, 2, 3, 5)]
        # (4, 3): four ranks, stopped before their third step. Then three ranks go on; they are
        # stopped before the fourth step that they make themselves. And so on.
        stopped_job = [(4, 3), (3, 4), (5, 2), (2, None)]
        for option, *jobs in (
            ("", *unstopped_jobs, stopped_job),
            (" --num-workers 2", [(2, 3), (1, None)]),
            (" --micro-batch-size 1", *unstopped_jobs, stopped_job),
        ):
            options = self.OPTIONS + option
            expected = plain_loop(ddp.make_parser().parse_args(options.split()))
            for runs in jobs:
                with self.subTest(options=options, runs=runs):
                    _, net = run_job_in_parts(options, *runs, **self.REPLACEMENTS)

                    assert_close(net, expected)

    def test_on_two_processes_a_stopped_job_ends_with_the_bits_of_one_that_was_not(self):
        expected_out, expected = run_job(self.OPTIONS, 2, **self.REPLACEMENTS)

        # The second run prints the line of epoch 0, and the third prints it again.
        out, net = run_job_in_parts(self.OPTIONS, (2, 3), (2, 3), (2, None), **self.REPLACEMENTS)

        tolerance = 1e-3 if GPUS >= 2 else 0  # Whether GPUs give the same bits is untried.
        assert_close(numbers_of(out)[1:], numbers_of(expected_out), tolerance)
        assert_close(net, expected, tolerance)


# ------------------------------------------------------------------------------------------------
# Above is what data-parallel training guarantees. Below are the helpers, and then all other tests.


# ---- Helpers
def as_rank(rank, world_size, folder, function, args):
    """Call a function on this rank of a new process group, and save its result."""
    ddp.end_with_parent()
    mp.set_start_method("fork", force=True)  # So loader workers start fastest.
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    backend = "gloo"
    if world_size <= GPUS:
        backend = "nccl"
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(
        backend,
        timeout=datetime.timedelta(minutes=2),  # if a rank leaves out a collective
        store=store,
        rank=rank,
        world_size=world_size,
    )
    torch.save(function(*args), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world_size, function, *args):
    """Call a function on each rank of a new group, and return the results.

    on_ranks(3, dist.get_rank) is [0, 1, 2]. The function stands at the top level of this file. Its
    results are tensors, numbers and strings, or lists, tuples and dictionaries of them. Tensors in
    args lie in memory that all ranks share. If a rank raises, the others are ended, and this
    function raises mp.ProcessRaisedException.
    """
    # The processes are forked from one that has imported what takes long. torch._dynamo is what the
    # first optimizer of a process would import.
    mp.set_forkserver_preload(["unittest.mock", "ddp_reference", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        call = world_size, folder, function, args
        mp.start_processes(as_rank, call, world_size, start_method="forkserver")
        return [torch.load(f"{folder}/{rank}", map_location="cpu") for rank in range(world_size)]


def device():
    """Return the device of this rank."""
    if dist.get_backend() == "nccl":
        return f"cuda:{dist.get_rank()}"
    return "cpu"


def job_on_rank(options, stop_at, replacements):
    """Run one rank of a job up to its end, or until it would make its step number stop_at.

    replacements: {"make_task": make_own_task} puts make_own_task in the place of
    ddp_reference.make_task. Returns what the rank printed. train() calls set_learning_rates(), or
    its replacement, before each step, and so a step is counted there.
    """
    vars(ddp).update(replacements)
    set_rates, steps = ddp.set_learning_rates, itertools.count(1)

    def set_or_stop(*args):
        if next(steps) == stop_at:
            raise InterruptedError
        # Since the last step watched() must have set the alarm anew: some 610 s are left, which are
        # --timeout and 10 s. Otherwise at most 300 s are left, which this line has set.
        assert signal.alarm(300) > 300
        set_rates(*args)

    ddp.set_learning_rates = set_or_stop
    sys.argv = ["ddp_reference.py", *shlex.split(options)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(InterruptedError):
        ddp.train(ddp.parse_args(), device())
    return out.getvalue()


def run_job_in_parts(options, *runs, **replacements):
    """Run a job in several runs (world_size, stop_at): return what rank 0 printed, and the net.

    run_job_in_parts("--epochs 2", (4, 3), (2, None)) makes two steps on four ranks, and all others
    on two ranks. stop_at counts the steps of its own run. The net is the state_dict in the last
    checkpoint, which is written after each step.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = f"--checkpoint-every 1 --checkpoint {folder}/ck {options}"
        out = ""
        for world_size, stop_at in runs:
            out += on_ranks(world_size, job_on_rank, options, stop_at, replacements)[0]
        checkpoint = torch.load(f"{folder}/ck", map_location="cpu")
        return out, checkpoint["net"]


def run_job(options, world_size, **replacements):
    """Run a job on so many ranks: return what rank 0 printed, and the net."""
    return run_job_in_parts(options, (world_size, None), **replacements)


def numbers_of(out):
    """Return the epoch, the losses and the accuracies in each line of an epoch."""
    lines = re.findall(r"epoch \d+ \| loss.*(?= \|)", out)
    return [[float(number) for number in re.findall(r"\d\S*|nan", line)] for line in lines]


def assert_close(actual, expected, tolerance=2e-5):
    """Assert that numbers or tensors are equal, by default up to the rounding of float32."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


PROGRAM = """
import ddp_reference, test_ddp_reference
ddp_reference.set_learning_rates = test_ddp_reference.{}
if __name__ == "__main__":
    ddp_reference.main()
"""


class TestInFolder(TestCase):
    """A test case with a temporary folder, which can start programs below it."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)

    @classmethod
    def start(cls, command, **environ):
        """Start a Python program in a new folder below cls.folder, with its output in pipes."""
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)],
            cwd=tempfile.mkdtemp(dir=cls.folder),
            env=os.environ | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        cls.addClassCleanup(process.terminate)  # in case no test has waited for it
        return process

    @classmethod
    def start_job(cls, options, before_step="set_learning_rates", launcher=""):
        """Start a small job, in which a function of this file replaces set_learning_rates().

        start_job("--epochs 1", "fail_on_rank_1") starts a job that fails, because train() calls
        fail_on_rank_1() before each step. The ranks are spawned: they import the program again,
        and so have the function, too. launcher: what follows `python`, such as TORCHRUN.
        """
        path = cls.folder / f"{before_step}.py"
        path.write_text(PROGRAM.format(before_step))
        return cls.start(f"{launcher} ../{before_step}.py {SMALL} {options}")


def finish(process, status=0):
    """Return (stdout, stderr) of a program, once all processes that hold its pipes have ended.

    The program must end with this exit status, and within 200 seconds.
    """
    out, err = process.communicate(timeout=200)
    assert process.returncode == status, f"status {process.returncode}: {err}"
    return out, err


# ---- The sampler
class TheSampler(TestCase):
    def test_an_order_takes_four_bytes_a_sample(self):
        sampler = ddp.DistributedSampler(range(1000), 1, 0)

        self.assertEqual(sampler.order().nbytes, 4000)  # A list has 36000.

    def test_a_second_pass_over_an_epoch_warns_to_call_set_epoch(self):
        sampler = ddp.DistributedBatchSampler(ddp.DistributedSampler(range(5), 2, 0), 5)
        list(sampler)

        with self.assertWarnsRegex(UserWarning, r"epoch 0 again: call set_epoch\(epoch\)"):
            list(sampler)

    def test_an_empty_dataset_and_a_step_with_fewer_samples_than_ranks_are_errors(self):
        for dataset, word in (([], "has no samples"), ([1], "a step of 1 samples is too small")):
            sampler = ddp.DistributedSampler(dataset, 2, 0)
            with self.assertRaisesRegex(ValueError, word):
                ddp.DistributedBatchSampler(sampler, 4)


# ---- A step
class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the names of PyTorch's operators that are called. All objects share the list."""

    names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def operators_of_a_step():
    """Make a step of two micro-batches: return the operators that are called."""
    x, y = ragged_batch(12)
    with Ops():
        step_on_rank(x, y, 2)
    return Ops.names


def printing_sums(output, y):
    """batch_sums(), which first prints in what state it is called.

    That is: whether gradients and autocast are on, the type of the output, the number of samples,
    and three random numbers.
    """
    print(output.requires_grad, torch.is_autocast_enabled(y.device.type), output.dtype, end=" ")
    print(len(y), torch.rand(1, device=y.device).item(), np.random.rand(), random.random())
    return batch_sums(output, y)


class TheStep(TestCase):
    def test_gradients_are_all_reduced_once_in_a_step_and_no_rank_waits_for_its_gpu(self):
        for names in on_ranks(2, operators_of_a_step):
            # DDP's own collectives, when it is made, come before the first convolution.
            names = names[names.index("aten.convolution.default") :]
            self.assertEqual(names.count("c10d.allreduce_.default"), 2)  # gradients, and sums
            self.assertNotIn("aten._local_scalar_dense.default", names)  # what .item() calls

    def test_ranks_and_steps_draw_random_numbers_of_their_own_and_evaluation_uses_amp(self):
        # With a loader worker, nothing but train_step() seeds the generators of the rank.
        options = f"{SMALL} --global-batch-size 11 --micro-batch-size 3 --amp --num-workers 1"
        ranks = on_ranks(2, job_on_rank, options, None, {"batch_sums": printing_sums})

        self.assertNotIn("False False", ranks[0])  # Evaluation, too, runs under autocast.
        first, second = (
            re.findall(r"True True torch.bfloat16 (\d) (\S+) (\S+) (\S+)", out) for out in ranks
        )
        sizes, *drawn = zip(*first, *second)
        # Each of the 8 steps has 6 samples for the first rank and 5 for the second, and so two
        # micro-batches on each rank.
        self.assertEqual("".join(sizes), "33" * 8 + "32" * 8)
        for numbers in drawn:
            self.assertEqual(len(set(numbers)), 32)


# ---- The checkpoint
def save(path, progress):
    """Write a checkpoint of a small net."""
    net = nn.Linear(50, 50)
    ddp.save_checkpoint(path, net, torch.optim.SGD(net.parameters()), {}, progress)


def nan_gradient(output, y):
    """In place of batch_sums(): a loss of 0 whose gradient is not a number."""
    return (0 * output.sum()).sqrt(), 0, len(y)


def job_with_a_file_of_rank_0(options):
    """Run one rank of a job. The options end with a path. Rank 1 appends a 1 to this path."""
    job_on_rank(f"{options}{dist.get_rank() or ''}", None, {})


class TheCheckpoint(TestInFolder):
    def setUp(self):
        self.path = self.folder / self._testMethodName
        self.options = f"{SMALL} --checkpoint {self.path}"

    def test_at_every_moment_the_file_is_whole_also_when_the_disk_is_full(self):
        seen = []
        save(self.path, "old")

        def look(file):
            seen.append(torch.load(self.path)["progress"])  # what a kill at this moment leaves

        with mock.patch.object(os, "fsync", look):
            save(self.path, "new")
        pathlib.Path(f"{self.path}.tmp").symlink_to("/dev/full")  # No byte can be written to it.
        with self.assertRaises((OSError, RuntimeError)):
            save(self.path, "lost")

        self.assertEqual([*seen, torch.load(self.path)["progress"]], ["old", "new"])

    def test_a_file_that_is_damaged_or_of_another_job_is_refused_and_stays(self):
        replacements = {"make_task": make_augmented_task}  # 43 samples, SGD
        on_ranks(2, job_on_rank, f"{self.options} --epochs 1", None, replacements)
        whole, code = self.path.read_bytes(), io.BytesIO()
        torch.save(print, code)
        for content, word, option, functions in (
            (whole[: len(whole) // 2], "Error", "", replacements),
            (code.getvalue(), "UnpicklingError", "", replacements),
            (whole, "'seed': 99", "--seed 99", replacements),
            (whole, "'samples': 44", "", {}),
            (whole, "Adam", "--num-samples 43", {}),
            # With micro-batches, make_augmented_task() makes another net.
            (whole, "RuntimeError", "--micro-batch-size 9", replacements),
        ):
            self.path.write_bytes(content)

            message = f"ValueError: {self.path} is damaged or of another job: .{{,200}}{word}"
            with self.assertRaisesRegex(mp.ProcessRaisedException, message):
                on_ranks(2, job_on_rank, f"{self.options} {option}", None, functions)
            self.assertEqual(self.path.read_bytes(), content)

    def test_a_checkpoint_that_not_all_ranks_find_is_an_error(self):
        on_ranks(1, job_on_rank, self.options, None, {})

        with self.assertRaisesRegex(mp.ProcessRaisedException, f"{self.path}: all machines need"):
            on_ranks(2, job_with_a_file_of_rank_0, self.options)

    def test_a_net_that_is_not_finite_is_not_saved(self):
        message = f"0.weight is not finite, so {self.path}"
        with self.assertRaisesRegex(mp.ProcessRaisedException, message):
            on_ranks(1, job_on_rank, self.options, None, {"batch_sums": nan_gradient})
        self.assertFalse(self.path.exists())


# ---- The job
def make_ragged_task(args, device):
    """A task with uneven labels, and with a net that is the same in training and evaluation."""
    net = plain_net().to(device)
    return Ragged(44, 40), Ragged(25, 40), net, torch.optim.Adam(net.parameters())


class Clock:
    """A clock that is two seconds later at each look."""

    perf_counter = itertools.count(0, 2).__next__


class TheJob(TestInFolder):
    def test_each_option_of_training_changes_the_net(self):
        options = "epochs 1|global-batch-size 9|micro-batch-size 1|lr 0.1|local-bn|amp|"
        options += "clip-grad-norm 0.01|seed 1|num-samples 40|length 65|epochs 2"
        weights = set()
        for option in options.split("|"):
            # These 3 steps replace the 1 of run_job(). Most of the jobs have two steps in an epoch.
            # They leave a file because the last step of an epoch is saved, too.
            _, net = run_job(f"{SMALL} --checkpoint-every 3 --{option}", 2)
            weights.add(net["0.weight"].sum().item())

        self.assertEqual(len(weights), 11)  # ten options, and two epochs: the unchanged job

    def test_all_printed_numbers_are_those_of_the_job_also_after_a_stop(self):
        # With a learning rate of 0 the net stays what it is, and its numbers are known.
        options = f"{SMALL} --lr 0 --global-batch-size 4 --log-every 3 --checkpoint-every 5"
        options += f" --checkpoint {self.folder}/ck"
        replacements = {"make_task": make_ragged_task, "time": Clock}
        # An epoch has 11 steps. This run makes six, and saves after the fifth.
        on_ranks(3, job_on_rank, options, 7, replacements)

        out, *others = on_ranks(3, job_on_rank, options, None, replacements)

        numbers = evaluation_of_one_process(plain_net(), 44)
        numbers += evaluation_of_one_process(plain_net(), 25)
        assert_close(numbers_of(out), [[0.0, *numbers], [1.0, *numbers]], 1e-3)
        self.assertIn("epoch 0, 20 samples read\n", out)
        told = re.findall(r"epoch (\d) \| (\d+)/44 samples \| loss \d\.\d{4}\n", out)
        self.assertEqual(told, [("0", "32"), ("0", "44"), ("1", "12"), ("1", "24"), ("1", "36")])
        self.assertRegex(out, r"44/44 samples \| loss (\S+)\nepoch 0 \| loss \1 ")
        # The second run reads (44 - 20) samples in 2 s, and in the next epoch 44 samples in 2 s.
        self.assertEqual(re.findall(r"[0-9.]+(?= samples/s\n)", out), ["12.0", "22.0"])
        self.assertEqual(others, ["", ""])


# ---- Tar shards
def npy(array):
    """Return the bytes of a .npy file."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def write_shard(path, *members):
    """Write a tar file with these members, pairs (name, bytes), as webdataset does."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def members_of(dataset):
    """Return three members for each sample of a dataset, with long names, after two other members.

    The names of folders hold a dot, as in v1.0/.
    """
    members = [("README", b"no sample"), (".hidden.x.npy", b"no sample")]
    for number, (x, y) in enumerate(dataset):
        name = "long/" * 30 + f"v1.{number // 10}/{number % 10}"
        members.append((f"{name}.x.npy", npy(x)))
        members.append((f"{name}.json", b"{}"))
        members.append((f"{name}.y.npy", npy(y)))
    return members


class TheShards(TestInFolder):
    def test_training_from_shards_is_training_from_their_samples_also_after_a_stop(self):
        a, b = self.folder / "a.tar", self.folder / "b.tar"
        members = members_of(ddp.SyntheticDataset(44, 64))
        write_shard(a, *members[:32])  # two other members, and those of ten samples
        write_shard(b, *members[32:])
        options = f"{SMALL} --shards {a} {b} --val-shards {b}"
        _, expected = run_job(SMALL, 1)

        _, net = run_job_in_parts(options, (3, 2), (2, None))

        assert_close(net, expected)

    def test_a_shard_that_is_cut_off_or_damaged_in_a_header_is_refused_and_named(self):
        path = self.folder / "damaged.tar"
        write_shard(path, *members_of(ddp.SyntheticDataset(2, 64)))
        whole = path.read_bytes()
        damaged = [whole[:length] for length in range(0, len(whole.rstrip(b"\0")), 64)]
        for place in (0, 100, 124, 148, 156):  # name, mode, size, checksum and kind of a member
            damaged.append(whole[:place] + b"?" + whole[place + 1 :])

        for content in damaged:
            path.write_bytes(content)
            with self.assertRaisesRegex(ValueError, "shard .*damaged.tar is damaged or lacks"):
                ddp.ShardDataset([path])

    def test_a_missing_repeated_or_pickled_member_is_refused_and_its_shard_named(self):
        path, x, code = self.folder / "one.tar", ("a.x.npy", npy(0)), npy(np.array([{}]))
        for word, *members in (
            (r"one.tar .*KeyError\('y.npy'\)", x),
            ("one.tar .*a.x.npy comes twice", x, x),
            ("one.tar .*it has no samples",),
            ("one.tar, sample 0: .*Object arrays cannot be loaded", x, ("a.y.npy", code)),
        ):
            write_shard(path, *members)
            with self.assertRaisesRegex(ValueError, word):
                ddp.ShardDataset([path])[0]

    def test_other_members_can_be_read_by_another_decode(self):
        path = self.folder / "other.tar"
        write_shard(path, ("a.txt", b"A"), ("a.cls", b"0"))

        dataset = ddp.ShardDataset([path], ("cls", "txt"), decode=lambda *contents: contents)

        self.assertEqual(dataset[0], (b"0", b"A"))


# ---- Launching, failing, ending. train() calls these functions in place of set_learning_rates().
def fail_on_rank_1(optimizer, args, epochs):
    """Rank 1 says how many threads it may have and on which network it listens, and fails."""
    if dist.get_rank() == 1:
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        raise ValueError(f"{os.environ['OMP_NUM_THREADS']} threads on {interface}")


def sleep_on_rank_0(optimizer, args, epochs):
    """Rank 0 sleeps before the first step."""
    if dist.get_rank() == 0:
        signal.pause()


def kill_in_the_second_epoch(optimizer, args, epochs):
    """Rank 0 is killed before the second step of the second epoch, but not after a restart."""
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_start and epochs > 1 and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    set_learning_rates(optimizer, args, epochs)


class TheProcesses(TestInFolder):
    """However a job ends, finish() sees all its processes end: they hold its pipes."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # A shell that runs the tests with & has Ctrl-C ignored, and the jobs would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        two = "--nproc-per-node 2 --backend gloo"
        # These jobs start now, and run side by side.
        cls.temporary = cls.folder / "# and space"  # As a part of a URL it would fail.
        cls.temporary.mkdir()
        main_job = f"{shlex.quote(str(HERE / 'ddp_reference.py'))} --length 300"
        cls.main_job = cls.start(main_job, TMPDIR=str(cls.temporary))
        cls.sleeping = cls.start_job(f"{two} --timeout 3", "sleep_on_rank_0")
        cls.failing = cls.start_job(two, "fail_on_rank_1")
        launcher = f"{TORCHRUN} --max-restarts=1"
        save = "--backend gloo --checkpoint-every 1 --checkpoint ck"
        cls.restarted = cls.start_job(save, "kill_in_the_second_epoch", launcher)

    def test_the_main_job_reports_its_epochs_and_learns_and_leaves_no_file(self):
        out, err = finish(self.main_job)
        out = re.sub(r"\[Gloo\].*\n+", "", out)  # PyTorch 2.9 prints such lines between.

        kind = f"nccl, world size {GPUS}, cuda" if GPUS else "gloo, world size 2, cpu"
        expected = f"ddp on {kind}, global batch size 32, torch {torch.__version__}\n"
        line = "loss # accuracy # | val_loss # val_accuracy # | # samples/s\n"
        expected += "".join(f"epoch {epoch} | {line}" for epoch in range(6))
        self.assertEqual(re.sub(r"(?<= )\d+\.\d+(?= )", "#", out), expected)
        self.assertRegex(out, r"epoch 5 .* val_accuracy 0\.9")  # Guessing would be 0.333.
        self.assertEqual((err, list(self.temporary.glob("tmp*"))), ("", []))

    def test_only_the_rank_that_raises_prints_a_traceback(self):
        _, err = finish(self.failing, status=1)

        threads = os.environ.get("OMP_NUM_THREADS") or max(1, torch.get_num_threads() // 2)
        self.assertRegex(err, rf"ValueError: {threads} threads on {LOOPBACK}\s+$")
        self.assertEqual(err.count("Traceback"), 1)

    def test_ranks_and_loader_workers_end_when_the_launcher_alone_is_ended(self):
        endless = "--epochs 100000 --log-every 1 --nproc-per-node 1"
        launchers = [self.start_job(endless), self.start_job(f"{endless} --num-workers 1")]
        ends = (signal.SIGINT, 130), (signal.SIGKILL, -9)
        for launcher, (signal_number, status) in zip(launchers, ends):
            while not launcher.stdout.readline().startswith("epoch"):
                self.assertIsNone(launcher.poll())

            launcher.send_signal(signal_number)

            finish(launcher, status)

    def test_torchrun_restarts_a_job_of_which_a_rank_was_killed(self):
        out, _ = finish(self.restarted)
        expected, _ = run_job(SMALL, 1)

        self.assertIn("epoch 1, 22 samples read\n", out)
        assert_close(numbers_of(out)[-1], numbers_of(expected)[-1], 1e-3)

    def test_when_a_rank_hangs_all_ranks_print_their_stacks_and_the_job_ends(self):
        _, err = finish(self.sleeping, status=1)

        # Rank 1 of 2 waits 5 / 2 seconds longer, so that the stacks are printed one by one.
        stack = r"!\n(?:Thread .*\n(?:  .*\n)+\n?)+"
        stacks = rf"(?m)^Timeout \(0:00:03\){stack}Timeout \(0:00:05\.500000\){stack}"
        self.assertRegex(err, stacks)
        self.assertRegex(err, r"test_ddp_reference.py.* in sleep_on_rank_0(?s:.*) SIGALRM\n$")


# ---- nn.DataParallel
class TheDataParallel(TestCase):
    def test_nn_dataparallel_trains_as_ddp_does(self):
        options = f"{SMALL} --micro-batch-size 5 --local-bn"
        expected, _ = run_job(options, 1)

        out, _ = run_job(f"{options} --parallel dp", 1)

        # On several GPUs, each GPU has BatchNorm statistics of its own.
        assert_close(numbers_of(out), numbers_of(expected), 0.1 if GPUS > 1 else 1e-3)


# ---- The command line
class TheCommandLine(TestCase):
    def test_what_cannot_work_is_refused_in_one_line_that_says_why(self):
        from_1 = "nproc-per-node epochs global-batch-size micro-batch-size checkpoint-every "
        from_1 += "log-every timeout num-samples length"
        refused = """
            --backend mpi: invalid choice
            --shards a.tar: go together
            --val-shards a.tar: go together
            --checkpoint-every 1: needs --checkpoint
            --checkpoint /none/ck: the folder /none is missing
            --parallel dp --amp: one process, without --amp
            --parallel dp --nproc-per-node 2: one process
            --backend nccl --nproc-per-node 99: needs a GPU for each process
        """
        for lowest, names in ((1, from_1), (0, "num-workers seed lr clip-grad-norm")):
            for name in names.split():
                # The lowest number is accepted, and what is below it is refused.
                ddp.make_parser().parse_args([f"--{name}={lowest}"])
                for value in (lowest - 1, "nan", "inf", "x"):
                    self.assert_refused(f"--{name}={value}", f"argument --{name}: .*{value}")
        for line in refused.strip().splitlines():
            self.assert_refused(*line.strip().split(": ", 1))

    def assert_refused(self, options, word):
        """Assert that the launcher exits with status 2 after a line with this word."""
        with (
            mock.patch.object(sys, "argv", ["ddp_reference.py", *options.split()]),
            contextlib.redirect_stderr(io.StringIO()) as err,
            self.assertRaisesRegex(SystemExit, "^2$"),
        ):
            ddp.main()
        self.assertRegex(err.getvalue(), rf"^.*: error: .*{word}.*\n$")


# ---- The README: what it shows is run
def blocks(heading):
    """Return the blocks of code in the section of the README under this heading."""
    section = re.search(rf"(?ms)^## {heading}\n(.*?)^## ", README)[1]
    return re.findall(r"(?s)```(?:diff|python)\n(.*?)```", section)


def side_of(diff, sign):
    """Return one side of a diff: the lines with this sign, and those with none."""
    return "".join(re.findall(rf"(?m)^[ {sign}](.*\n)", diff))


def patched(source, diff):
    """Apply a diff, whose hunks begin with @@. Each must fit at one place of the source."""
    for hunk in re.split(r"(?m)^@@.*\n", diff):
        old, new = side_of(hunk, "-"), side_of(hunk, "+")
        # If this fails, the README quotes a line that has changed.
        assert not hunk or source.count(old) == 1, hunk
        source = source.replace(old, new)
    return source


def write_programs(folder):
    """Write the programs of the README into a folder."""
    diff, *changes = blocks("From one GPU to many")
    classifier, regression = blocks("Your own job")
    many = side_of(diff, "+")
    for name, text in (
        ("one", side_of(diff, "-")),
        ("many", many),
        ("many_changed", patched(many, "".join(changes))),
        ("my_job", patched(SOURCE, classifier)),
        ("regression", patched(SOURCE, regression)),
    ):
        (folder / f"{name}.py").write_text(text)


def changed_job(path, options):
    """Run one rank of a job. The names of a changed copy of ddp_reference.py replace the file's."""
    return job_on_rank(options, None, runpy.run_path(str(path)))


class TheReadme(TestInFolder):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        write_programs(cls.folder)

    def test_both_sides_of_the_readmes_diffs_train_the_same(self):
        environ = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NVIDIA_TF32_OVERRIDE": "0"}
        if GPUS < 2:
            environ["CUDA_VISIBLE_DEVICES"] = ""  # The ranks need a GPU each.
        programs = [
            self.start(f"{launcher} ../{name}.py", **environ)
            for launcher, name in (("", "one"), (TORCHRUN, "many"), (TORCHRUN, "many_changed"))
        ]

        for program in programs:
            finish(program)

        nets = [torch.load(path, map_location="cpu") for path in self.folder.glob("*/model.pt")]
        assert_close(nets, [nets[0]] * 3)

    def test_the_readmes_example_jobs_train_the_same_on_one_and_three_processes(self):
        for name in ("my_job.py", "regression.py"):
            arguments = changed_job, self.folder / name, "--epochs 2 --length 64"
            one, three = (numbers_of(on_ranks(size, *arguments)[0]) for size in (1, 3))

            assert_close(three, one, 1e-3)

    def test_the_readmes_exercises_fit_the_file(self):
        [exercises] = blocks("Review exercises")

        self.assertNotEqual(patched(SOURCE, exercises), SOURCE)


def main():
    """Run the tests and end with a line `N passed, N failed, N skipped`, or write programs."""
    if sys.argv[1:] == ["programs"]:
        return write_programs(pathlib.Path.cwd())
    result = unittest.main(exit=False, verbosity=2).result
    failed = len(result.failures + result.errors)
    skipped = len(result.skipped)
    passed = max(0, result.testsRun - failed - skipped)  # More subtests may fail than tests run.
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0 or not passed)  # NAME in -k NAME may be mistyped.


if __name__ == "__main__":
    main()
