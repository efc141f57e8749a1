import numpy as np

from vllm_tide.control.gate import Gate


def test_it_comes_on_again_for_more_than_it_went_off_at():
    gate = Gate(min_gain=0.02, probe_share=0.01)
    assert gate.decide(1.03, 1.03, 0.0) == ""
    assert gate.decide(1.01, 1.01, 0.0) == "no_gain" and not gate.on
    assert gate.decide(1.03, 1.03, 0.0) == "no_gain"
    assert gate.decide(1.05, 1.05, 0.0) == "" and gate.on
    assert gate.decide(0.9, 1.5, 0.0) == "slo"


def test_rounds_of_a_noisy_machine_are_no_evidence_and_slow_ones_are():
    rng, gate = np.random.default_rng(0), Gate(min_gain=0.02, probe_share=0.01)
    trusted, noise = [], 0.0
    for turn in range(2048):
        noise = 0.9 * noise + 0.044 * rng.standard_normal()
        slow = 1.0 if turn < 2000 else 1.5
        gate.drafting.add_time(1.0, slow * np.exp(noise))
        trusted.append(gate.drafting.ratio())
    assert np.quantile(trusted[:2000], 0.02) > 0.94
    assert trusted[-1] < 0.8
