"""What a measurement was made on."""

import datetime
import os

import keras
import tensorflow as tf


def description() -> str:
    """One line, without the name of the machine."""
    return (
        f"{os.cpu_count()} cores ({_processor()}), "
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"{datetime.date.today()}"
    )


def processor() -> str:
    """As above, for measurements of other frameworks."""
    return f"{os.cpu_count()} cores ({_processor()}), {datetime.date.today()}"


def _processor():
    """The kind of processor, as far as the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return "unknown"
    told = {name.strip(): value.strip() for name, _, value in lines}
    flags = told.get("flags", "").split()
    known = [f for f in ("avx2", "avx512f", "avx512_vnni") if f in flags]
    name = told.get("model name", "unknown")
    # Some names are those of several generations.
    family = f"family {told.get('cpu family', 'unknown')}"
    return ", ".join([name, family, *(flag.upper() for flag in known)])


def free_memory() -> int:
    """Bytes that are free now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
