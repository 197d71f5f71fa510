"""Where everything stands in an epoch: orders, schedules, mixtures and packings. Pure arithmetic, without I/O."""
