"""Tasks: model, data, loss and metrics. Here their names, and settings of Orchestra's own.

What needs torch is imported when it is first used, since settings must not.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from orchestra.errors import InputError
from orchestra.settings import REQUIRED, Call, Registry, Settings, setting
from orchestra.settings.notation import bound, build, lazy_package, read, write

if TYPE_CHECKING:
    from orchestra.tasks.task import Loss, Metrics, Task, TensorData, evaluate, load_task

__all__ = ["Loss", "Metrics", "Task", "TensorData", "evaluate", "load_task"]
__getattr__ = lazy_package(__name__, "task", names=__all__)


@dataclass(frozen=True, repr=False)
class TaskSettings(Settings):
    """Base of the settings below: a function of the class's name in `MODULE` makes the task."""

    MODULE: ClassVar[str]

    def build(self) -> Task:
        """Make the task: data in memory or mapped from the cache, and a model of these settings.
        Raises InputError: a file that the task needs is missing, damaged or of another kind."""
        module = importlib.import_module(f"orchestra.tasks.{self.MODULE}")
        task: Task = getattr(module, type(self).__name__.lower())(self)
        return task


@dataclass(frozen=True, repr=False)
class Digits(TaskSettings):
    """scikit-learn's digits: 1,797 images of real handwriting, 8 x 8 pixels, ten classes.

    The split is fixed and stratified: 1,198 images for training, 299 for validation, 300 for the
    test. Pixels are scaled by the mean and standard deviation of the training images. The model
    is a CNN of two convolutions and two linear layers; loss: cross entropy; metric: accuracy.
    """

    MODULE: ClassVar = "classification"
    _: KW_ONLY
    channels: int = setting(
        16, "channels of the first convolution; the second has twice as many", low=1, high=10_000
    )
    hidden: int = setting(128, "units of the hidden linear layer", low=1, high=100_000)
    dropout: float = setting(0.0, "share of hidden units dropped in training", low=0, high=1)
    batch_norm: bool = setting(False, "normalise each batch after the convolutions")
    augment: bool = setting(False, "shift each training image by up to one pixel, at random")


@dataclass(frozen=True, repr=False)
class Digits28(TaskSettings):
    """Distorted handwriting: 28,000 images, 28 x 28 pixels, made from scikit-learn's digits.

    Each of the 1,797 originals (8 x 8 pixels) is enlarged, and then turned, resized, sheared,
    shifted and pulled elastically, in another way each time. Originals are split before that, as
    in the task digits: 1,198 give the 20,000 training images, 299 others the 4,000 for validation,
    300 others the 4,000 of the test. The images are made once, in seconds, and kept in the user's
    cache folder (`ORCHESTRA_CACHE`, or `orchestra` in `XDG_CACHE_HOME` or `~/.cache`).

    The model is LeNet-5 (LeCun et al., 1998) with 61,706 parameters, in its present-day variant:
    padding in place of 32 x 32 inputs, ReLU, max-pooling, all maps connected, linear outputs.
    Loss: cross entropy; metric: accuracy.
    """

    MODULE: ClassVar = "classification"
    _: KW_ONLY
    train_samples: int = setting(
        20_000, "images to train on, the first ones of all", low=1, high=20_000
    )
    distortion: float = setting(1.0, "strength of the distortions; 0 only enlarges", low=0, high=2)


@dataclass(frozen=True, repr=False)
class Images(TaskSettings):
    """Synthetic images of CIFAR's shape, told apart by their textures, for a residual network.

    7,000 images of 3 x 32 x 32 pixels in ten classes: 4,000 for training, 1,000 for validation,
    2,000 for the test, each drawn by itself. A class is a texture, two waves of its own in two
    colours. An image shows it in a soft disc somewhere, turned by up to 20 degrees, resized by up
    to a quarter, with phases, contrast and colours that vary, before a texture that means
    nothing, and under Gaussian noise. The images are made once, in seconds, and kept in the
    user's cache folder (see the task digits28).

    The model is ResNet-20 (He et al., 2016: CIFAR's form, with batch normalisation and
    shortcuts without parameters): 269,722 parameters. Loss: cross entropy; metric: accuracy.
    """

    MODULE: ClassVar = "images"
    _: KW_ONLY
    train_samples: int = setting(
        4_000, "images to train on, the first ones of all", low=1, high=4_000
    )
    noise: float = setting(
        0.1, "standard deviation of the noise; pixels are from 0 to 1", low=0, high=1
    )


@dataclass(frozen=True, repr=False)
class Mnist(TaskSettings):
    """MNIST: handwritten digits of 28 x 28 pixels, from IDX files that you have.

    60,000 images for training, and 10,000 for the test (LeCun et al., 1998). The same images of the
    training data are always held out for validation. Files may be compressed (.gz). The model is
    LeNet-5, see the task digits28. Loss: cross entropy; metric: accuracy.
    """

    MODULE: ClassVar = "images"
    folder: str = setting(REQUIRED, "where the four files are")
    _: KW_ONLY
    validation_samples: int = setting(
        5000, "training images held out for validation", low=1, high=59_999
    )


@dataclass(frozen=True, repr=False)
class Cifar10(TaskSettings):
    """CIFAR-10: photographs of 32 x 32 pixels in ten classes, from binary files that you have.

    50,000 images for training, and 10,000 for the test (Krizhevsky, 2009). The same images of the
    training data are always held out for validation. The model is ResNet-20, see the task images.
    Loss: cross entropy; metric: accuracy.
    """

    MODULE: ClassVar = "images"
    folder: str = setting(REQUIRED, "where the six files are")
    _: KW_ONLY
    validation_samples: int = setting(
        5000, "training images held out for validation", low=1, high=49_999
    )
    augment: bool = setting(
        True, "mirror each training image or not, and shift it by up to 4 pixels, at random"
    )


@dataclass(frozen=True, repr=False)
class Characters(TaskSettings):
    """Text: what a small GPT learns of Python's own documentation, character by character.

    The text is `pydoc_data.topics` of the standard library, about 370,000 characters once every
    paragraph that occurs again is left out. It differs between versions of Python: compare runs
    of one version only; `orchestra.tasks.characters.text_sha256()` tells texts apart. The first
    80% train, the next 10% validate, the last 10% test; each part is cut into windows that do not
    overlap. A sample is a window of `context` characters. The model predicts each character from
    those before it.

    The model is a GPT over 97 characters: 116,705 parameters at the defaults. Loss: cross entropy
    in nats, the mean over characters; metric: bits_per_character, the same in bits (6.6 for an
    even guess among 97).
    """

    MODULE: ClassVar = "characters"
    _: KW_ONLY
    context: int = setting(64, "characters in a window", low=1, high=100_000)
    layers: int = setting(2, "transformer blocks", low=1, high=1000)
    heads: int = setting(4, "heads of attention; they divide the width", low=1, high=1000)
    width: int = setting(64, "numbers that stand for a character", low=1, high=100_000)

    def check(self) -> None:
        """Check that each head gets an equal share of the width."""
        if self.width % self.heads:
            raise InputError(
                f"Characters: width {self.width} is no multiple of heads {self.heads}; "
                f"set width to {self.width - self.width % self.heads + self.heads}"
            )


@dataclass(frozen=True, repr=False)
class Regression(TaskSettings):
    """Learn what a seeded random network says, through Gaussian noise.

    Inputs are standard normal. The teacher is `tanh(x A) B`, each of its outputs scaled to mean 0
    and variance 1 over the whole data; then noise of standard deviation `noise` is added. So no
    model can expect an R² above 1 / (1 + noise²): 0.990 at the default. Teacher, data and split
    follow from `data_seed` alone. The student is a network of two hidden layers with tanh.
    Loss: mean squared error; metrics: see `scores` in `orchestra.tasks.regression`.
    """

    MODULE: ClassVar = "regression"
    _: KW_ONLY
    inputs: int = setting(32, "numbers in a sample", low=1, high=100_000)
    outputs: int = setting(16, "numbers to predict", low=1, high=100_000)
    noise: float = setting(
        0.1, "standard deviation of the noise; the signal's is 1", low=0, high=1e6
    )
    hidden: int = setting(128, "units of each hidden layer of the student", low=1, high=100_000)
    train_samples: int = setting(8192, "samples to train on", low=2, high=100_000_000)
    validation_samples: int = setting(1024, "samples for validation", low=2, high=100_000_000)
    test_samples: int = setting(1024, "samples for the test", low=2, high=100_000_000)
    data_seed: int = setting(0, "seed of teacher, samples and noise", low=0, high=2**32 - 1)


@dataclass(frozen=True, repr=False)
class Synthetic(TaskSettings):
    """A model of `parameters` in `tensors` of equal size, and `sample_flops` operations a sample.

    For simulations of time alone (`tensors: shapes`): what it learns, the mean of its parameters
    times a number, is of no interest. For a real model's figures give its number of parameters, how
    many tensors they are in, and the operations of a sample's gradient (six a parameter and token
    for a transformer).
    """

    MODULE: ClassVar = "regression"
    parameters: int = setting(100_000_000, "elements of all tensors together", low=1, high=10**13)
    _: KW_ONLY
    tensors: int = setting(150, "that the parameters are in, of equal sizes", low=1, high=100_000)
    sample_flops: float | None = setting(
        None,
        "floating-point operations of a sample's gradient; none: 6 a parameter",
        above=0,
        high=1e24,
    )
    samples: int = setting(1_000_000, "in an epoch", low=1, high=10**9)

    def check(self) -> None:
        """Check that each tensor has an element."""
        if self.tensors > self.parameters:
            raise InputError(
                f"synthetic: {self.parameters} parameters are too few for {self.tensors} tensors"
            )


def makes_task(target: Any) -> bool:
    """Return whether `target`, a function or a class, says that it makes a `Task`, or settings
    of one: by its return annotation, or by that of its method `build`.

    Nothing is called, and torch is not imported.
    """
    maker = getattr(target, "build", target) if isinstance(target, type) else target
    try:
        made = maker if isinstance(maker, type) else get_type_hints(maker).get("return")
    except (NameError, TypeError):  # names that only a type checker imports
        made = getattr(maker, "__annotations__", {}).get("return")
    if isinstance(made, str):
        return made.rpartition(".")[2] == "Task"
    if not isinstance(made, type):
        return False
    # By name: importing `Task` would import torch.
    names = {f"{cls.__module__}:{cls.__qualname__}" for cls in made.__mro__}
    return "orchestra.tasks.task:Task" in names or (
        issubclass(made, Settings) and hasattr(made, "build")
    )


TASKS = Registry(
    "task",
    {
        cls.__name__.lower(): f"{__name__}:{cls.__name__}"
        for cls in (Characters, Cifar10, Digits, Digits28, Images, Mnist, Regression, Synthetic)
    },
    group="orchestra.tasks",
    makes=makes_task,
)

_OFFERS = 5  # functions of a module that a message names


def task_text(text: str | Call, *, where: str) -> str:
    """Return `text`, the notation of a task, in its normal form, checked without torch.

    A task with a name is checked to the last setting. Of `package.module:function` only the package
    is looked for; importing it, and checking its arguments, is left to `bound`. Raises InputError:
    not a constructor call, an unknown name or argument, a refused value.
    """
    return write(_settings_or_call(text, where), TASKS)


def task_name(text: str) -> str:
    """Return the name of a task, without place and arguments: "function" of package:function(1)."""
    return read(text, where="task").name.rpartition(":")[2]


def _settings_or_call(text: str | Call, where: str) -> Settings | Call:
    # `spam.py` is a file to the user: the message then offers the functions of the module.
    call = read(text.removesuffix(".py") if isinstance(text, str) else text, where=where)
    if not TASKS.knows(call.name) and (functions := _functions_of(call.name)):
        offers = " or ".join(f"{call.name}:{name}" for name in functions)
        raise InputError(f"{where}: {call.name} is a module; name a function of it: {offers}")
    package = call.name.partition(":")[0].partition(".")[0]
    if ":" not in call.name:
        target = bound(call, TASKS, where=where)
        if isinstance(target, type) and issubclass(target, Settings):
            task = build(call, TASKS, where=where)
            assert isinstance(task, Settings)
            return task
    elif package not in sys.modules and importlib.util.find_spec(package) is None:
        raise InputError(
            f"{where}: there is no package or module {package!r} in this folder or installed"
        )
    return call


def _functions_of(module: str) -> list[str]:
    """Return the functions of a module that name tasks, else its public ones, without an import."""
    spec = None if module in sys.stdlib_module_names else importlib.util.find_spec(module)
    if spec is None or not (spec.origin or "").endswith(".py"):
        return []
    try:
        # Read and not imported: this is for a message, and importing runs the module's code.
        body = ast.parse(Path(spec.origin or "").read_bytes()).body
    except (SyntaxError, ValueError):
        return []
    public = [it for it in body if isinstance(it, ast.FunctionDef) and it.name[0] != "_"]
    tasks = [
        it
        for it in public
        if any("Task" in (getattr(n, "id", None), getattr(n, "attr", None)) for n in ast.walk(it))
    ]
    return [it.name for it in tasks or public][:_OFFERS]
