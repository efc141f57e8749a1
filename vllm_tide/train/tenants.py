"""How much one tenant may weigh, so that no client steers the head alone.

Two bounds, both `tide.train.tenant_share`: on what a tenant may hold of the buffer
(`Side` in `reservoir`), and here on its share of what is drawn, since a buffer that is
not full yet would otherwise be whoever is loudest. Requests without a tenant are many
unknown clients and have no such bound: a gateway that wants one names its tenants.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_tide.transport.tenant import NOBODY


def cap_factors(masses: Mapping[int, float], share: float) -> dict[int, float]:
    """Factors that bring every tenant down to its share.

    With the j heaviest capped at a level L and a rest R left as it is, L is the share
    of the whole: L = share (j L + R), so L = share R / (1 - j share); j is the
    smallest number for which no tenant of the rest exceeds L. Where nothing can fill
    the rest (all tenants are over their share and nobody else is there) all weigh
    alike.

    Args:
        masses: Expected tokens drawn, by tenant id.
        share: Largest share of one tenant (0 to 1).

    Returns:
        A factor below 1 for each tenant that is over its share.
    """
    named = sorted(
        ((mass, tenant) for tenant, mass in masses.items() if tenant != NOBODY),
        reverse=True,
    )
    nobody = masses.get(NOBODY, 0.0)
    if share >= 1 or not named:
        return {}
    level = named[-1][0]
    for capped in range(len(named) + 1):
        rest = nobody + sum(mass for mass, _ in named[capped:])
        if rest <= 0 or capped * share >= 1:
            break
        bound = share * rest / (1 - capped * share)
        if capped == len(named) or named[capped][0] <= bound:
            level = bound
            break
    return {tenant: level / mass for mass, tenant in named if mass > level}
