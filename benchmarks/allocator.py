"""What glibc is told before a process starts, so that it keeps freed memory."""

# XLA on CPU asks malloc for the temporary memory of every call. By default glibc gives
# large blocks back to the system at once, and the next call meets them as page faults:
# on GPUs, whose allocator keeps what is freed, nothing of the kind happens.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "MALLOC_ARENA_MAX": "1",
}
# Pages of 2 MiB, from glibc 2.35 on: fewer entries for the processor to look up.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
