"""One sampler for prefill and decode. `params` and `random` are pure; `sampler` needs torch."""
