"""What the figures mean, in plain words: rules with thresholds, each with what to change, worst first.

A rule looks at the evidence and answers with a finding or nothing. Rules stand in the order of what they explain: a recording with
holes, at the wrong place or of other weights makes every later figure meaningless, so where such a rule speaks, the rules about
causes keep silent. `docs/report.md` lists all of them.
"""

from moerl.report.evidence import Evidence, Finding
from moerl.report.rules_causes import CAUSES
from moerl.report.rules_faults import EXPLAINS, FAULTS
from moerl.report.rules_figures import FIGURES

_ORDER = ("error", "warning", "note", "good")


def findings(evidence: Evidence) -> list[Finding]:
    """All findings, worst first; one that says so if there is nothing to do."""
    found = [finding for rule in FAULTS if (finding := rule(evidence))]
    if not any(finding.severity == "error" and finding.id in EXPLAINS for finding in found):
        found += [finding for rule in CAUSES if (finding := rule(evidence))]
    found += [finding for rule in FIGURES if (finding := rule(evidence))]
    if not any(finding.severity in ("error", "warning") for finding in found):
        found.append(Finding("good", "sound", "Nothing is wrong with these routes", "No rule found a fault.", "Nothing to do."))
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))
