"""What a runner may take of the machine."""

import resource


def limit_memory(share=0.9):
    """Turns running out of memory into an error that can be reported."""
    try:
        with open("/proc/meminfo") as f:
            available = next(
                int(x.split()[1]) for x in f if "MemAvailable" in x
            )
        with open("/proc/self/statm") as f:
            mapped = int(f.read().split()[0]) * resource.getpagesize()
    except (OSError, StopIteration):
        return
    limit = mapped + int(available * 1024 * share)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
