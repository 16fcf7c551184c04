"""What a bug report or a privacy report should say of the machine."""

import importlib.metadata
import os
import platform

import keras
import tensorflow as tf

from keras_fastclip import _keras

PACKAGES = (
    "keras-fastclip",
    "tensorflow",
    "keras",
    "keras-hub",
    "dp-accounting",
    "cryptography",
    "numpy",
)


def environment() -> dict[str, str]:
    """Versions, devices and settings that results may depend on."""
    return {
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "oneDNN": "on" if _keras.uses_onednn() else "off",
        "noise": _noise(),
        "dtype policy": keras.config.dtype_policy().name,
    }


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices():
    devices = [f"CPU with {os.cpu_count()} cores"]
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        devices.append(details.get("device_name", gpu.name))
    return ", ".join(devices)


def _noise():
    """As `noise.py` chooses."""
    if _keras.on_cpu():
        return (
            "AES keystream with keys from the operating system; "
            "Philox in steps compiled by XLA; with noise='secure', exact"
        )
    return "Philox on the device, with 128 secret bits"
