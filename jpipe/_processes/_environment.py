"""The variables by which `python -m jpipe launch` tells processes who they are."""

COORDINATOR = "JPIPE_COORDINATOR"
PROCESSES = "JPIPE_PROCESSES"
PROCESS = "JPIPE_PROCESS"
LOCAL_PROCESSES = "JPIPE_LOCAL_PROCESSES"  # those that share the cores of this host
TIMEOUT = "JPIPE_TIMEOUT"
TRANSPORT = "JPIPE_TRANSPORT"
