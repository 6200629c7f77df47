"""The life of models: registry, loading, pools, slots, leases, drain."""
