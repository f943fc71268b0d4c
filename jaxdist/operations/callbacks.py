"""Callbacks of operations. The commands and `library` import them from here."""

from jaxdist.operations.copies.copying import CheckpointCopies
from jaxdist.operations.ledger.ledger import Ledger, command_age_s
from jaxdist.operations.metrics.serving import MetricsServer
from jaxdist.operations.page.report import Report
from jaxdist.operations.watch.notices import PreemptionNotices
from jaxdist.operations.watch.pace import Stragglers
from jaxdist.operations.watch.probe import Probe
from jaxdist.operations.watch.replica_check import ReplicaCheck
from jaxdist.operations.watch.step_alarm import SlowSteps
from jaxdist.operations.watch.watchdog import Watchdog

__all__ = [
    "CheckpointCopies",
    "Ledger",
    "MetricsServer",
    "PreemptionNotices",
    "Probe",
    "ReplicaCheck",
    "Report",
    "SlowSteps",
    "Stragglers",
    "Watchdog",
    "command_age_s",
]
