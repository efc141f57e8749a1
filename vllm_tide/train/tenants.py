"""How much one tenant may weigh, so that no client steers the head alone.

Two bounds, both `tide.train.tenant_share`: on what a tenant may hold of the buffer
(`Side` in `reservoir`), and here on its share of what is drawn, since a buffer that is
not full yet would otherwise be whoever is loudest. Requests without a tenant are many
unknown clients and have no such bound: a gateway that wants one names its tenants.
The judge, which is made of held-out requests, is kept from the loud by `crowded_out`.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping

from vllm_tide.train.sample import Sample
from vllm_tide.transport.tenant import NOBODY

FLOORS, FLOOR_REQUESTS = 8, 3
"""Most tenants with a floor, and held-out requests that earn one: a client that names
a new tenant for each request has none."""
TENANT_IDLE_S, GROUP_IDLE_S = 600.0, 120.0
"""A tenant or a group unseen for so long has no floor: judged is what is served."""


def crowded_out(
    windows: Mapping[int, Sample],
    named: list[int],
    now_unix_s: float,
    rng: random.Random,
) -> int:
    """Serial number of the held-out window that makes room for newer ones.

    One at random, so what is held follows the traffic with a delay of about its own
    size, and nobody holds less than a share of it equal to that of the traffic. But
    the tenants with a floor hold half together, and alike, before all others (unnamed,
    or named too seldom) hold more than that; and a group keeps half of an equal share.

    Args:
        windows: By serial number, oldest first.
        named: Tenants with a floor: who has one keeps it while it is seen.
        now_unix_s: Trainer's clock (s).
        rng: Generator.
    """
    by_tenant: defaultdict[int, list[int]] = defaultdict(list)
    groups: Counter[int] = Counter()
    newest: dict[int, int] = {}
    for serial, window in windows.items():
        by_tenant[window.tenant].append(serial)
        groups[window.group] += window.num_tokens
        newest[window.group] = serial
    idle = now_unix_s - TENANT_IDLE_S
    seen = [
        tenant
        for tenant, held in by_tenant.items()
        if tenant != NOBODY and windows[held[-1]].captured_unix_s >= idle
    ]
    named[:] = [tenant for tenant in named if tenant in seen]
    named += [
        tenant
        for tenant in seen
        if tenant not in named
        and len({windows[serial].key for serial in by_tenant[tenant]}) >= FLOOR_REQUESTS
    ]
    del named[FLOORS:]
    sizes = {t: sum(windows[n].num_tokens for n in by_tenant[t]) for t in named}
    total = groups.total()
    if named and 2 * sum(sizes.values()) > total:
        chosen = by_tenant[max(named, key=sizes.__getitem__)]
        chosen = chosen[:-1] or chosen
    else:
        chosen = [n for t, held in by_tenant.items() if t not in sizes for n in held]
    # The newest says when a tenant or a group was seen: it stays.
    idle = now_unix_s - GROUP_IDLE_S
    active = {
        group: serial
        for group, serial in newest.items()
        if group >= 0 and windows[serial].captured_unix_s >= idle
    }
    floor = total / (2 * len(active) or 1)
    loose = [
        serial
        for serial in chosen
        for window in (windows[serial],)
        if window.group not in active
        or groups[window.group] - window.num_tokens >= floor
        and serial != active[window.group]
    ]
    return rng.choice(loose or chosen)


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
