"""What the entry points share: process settings, flags, and errors as one line.

The only reader of flags. Process-wide settings are made here, before the first JAX call, and never
by `import advdet`.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import os
import sys
from collections.abc import Callable, Sequence

from absl import app, flags

from experiments import path_flags

# glibc gives arrays of over 128 KiB back to the system after each operation and takes them again
# for the next; on CPU that is up to half of the time of a small network. Threads with arenas of
# their own do so whatever the thresholds say (an arena's heaps end at 64 MiB), hence one arena.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_GLIBC_KEEP_BYTES, _GLIBC_GROW_BYTES = 2**30, 2**28
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def configure_process() -> None:
    """Makes the process-wide settings; call it before the first JAX computation.

    One JAX device for each CPU core (lanes are sharded over them), memory kept between operations,
    compiled programs cached on disk, patience for CPU collectives on a loaded machine.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras itself would look for TensorFlow
    timeout_flag = "xla_cpu_collective_call_terminate_timeout_seconds"
    if timeout_flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{timeout_flag}=600".strip()

    if sys.platform.startswith("linux"):
        try:
            mallopt = ctypes.CDLL("libc.so.6").mallopt
            mallopt(_M_MMAP_THRESHOLD, _GLIBC_KEEP_BYTES)
            mallopt(_M_TRIM_THRESHOLD, _GLIBC_KEEP_BYTES)
            mallopt(_M_TOP_PAD, _GLIBC_GROW_BYTES)
            mallopt(_M_ARENA_MAX, 1)
        except (OSError, AttributeError):
            pass  # another C library (musl, say): slower, nothing else

    import jax
    from absl import logging

    from advdet import datasets

    logging.set_verbosity(logging.WARNING)  # JAX tells of each backend that is not there

    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
        jax.config.update("jax_num_cpu_devices", num_cores)
    jax.config.update("jax_compilation_cache_dir", str(datasets.cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # Records are the same whatever the environment says of these.
    jax.config.update("jax_enable_x64", False)
    for checked in ("jax_debug_nans", "jax_debug_infs"):  # infinity is an ordinary distance here
        jax.config.update(checked, False)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # a bare assertion where cuda is not there
        wanted, why = os.environ.get("JAX_PLATFORMS"), " ".join(str(error).split())
        hint = f"; JAX_PLATFORMS={wanted} asks for one: unset it, or install it" if wanted else ""
        _refuse(f"JAX finds no device{f' ({why})' if why else ''}{hint}")


def nearest(name: str, known: Sequence[str]) -> str:
    """` (did you mean X?)` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f" (did you mean {close[0]}?)" if close else ""


def run(main: Callable[..., int | None], words: int = 0) -> None:
    """Parses the flags and calls `main`; the user's errors become one line and status 2.

    Args:
      main: reads `_FLAG.value`s, returns the exit status or None for 0.
      words: how many words, at most, may stand on the command line beside flags; `main` gets them.
    """

    def parse(argv):
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:
            _refuse(" ".join(str(error).split()))
        if len(rest) > 1 + words:
            _refuse(
                f"words left over on the command line: {' '.join(rest[1 + words :])}; "
                "flags are written --name=value, --help lists them"
            )
        return rest

    def guarded(argv):
        try:
            from advdet.types import InputError

            configure_process()
            try:
                return main(*argv[1:])
            except InputError as error:
                _refuse(str(error))
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                _refuse(
                    f"{error.filename or 'a file'} cannot be written ({error.strerror}); what was "
                    "kept before is there: make room, and go on with --resume"
                )
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            sys.exit(130)

    try:
        try:
            app.run(guarded, flags_parser=parse)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _refuse(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def data():
    """The data set's name, or the user's own `Splits`: what `advdet.evaluate` takes."""
    from advdet import Splits, named

    if named.is_own(DATASET.value):
        return named.instance(DATASET.value, "the data set", Splits)
    return DATASET.value


def splits():
    """The data, loaded."""
    from advdet import Splits, datasets

    found = data()
    if isinstance(found, Splits):
        return found
    return datasets.load(found, DATA_SOURCE.value, DATA_DIR.value)


DATASET = flags.DEFINE_string(
    "dataset",
    "mnist",
    "Data set: mnist, mnist_5k (the 5,000 real digits that need no network), cifar10, or the name "
    "of any image classification set that TensorFlow Datasets has prepared in --data_dir. "
    "package.module:name for an advdet.Splits of your own.",
)
DATA_SOURCE = flags.DEFINE_enum(
    "data_source",
    "auto",
    ["auto", "tfds", "embedded"],
    "Where images come from. auto: prepared data, else download, else (MNIST only, and loudly) the "
    "embedded mnist_5k. tfds: prepared data or an error. embedded: mnist_5k.",
)
DATA_DIR = path_flags.define(
    "data_dir",
    None,
    "Folder of TensorFlow Datasets' prepared sets (default: $TFDS_DATA_DIR, else "
    "~/tensorflow_datasets). `python -m experiments.prepare_data` fills it without TensorFlow.",
)
SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of everything random: training, targets, attack, judge.", lower_bound=0
)
