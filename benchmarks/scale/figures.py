"""Public figures that the simulation takes as given, each with its source; and the assumptions.

Checked in 2026-11. Prices are those of us-east-1, on demand, in dollars.
"""

from __future__ import annotations

from scale.model import Store

# Latencies and rates: "Best practices design patterns: optimizing Amazon S3 performance", docs.aws.amazon.com/AmazonS3: 100 to
# 200 ms for small objects and first bytes; at least 5,500 GET a second for each prefix; one connection for each 85 to 90 MB/s.
# The tail is an assumption: a lognormal distribution, with 1 % above a second. So is the share of 503s.
S3 = Store(median_seconds=0.15, p99_seconds=1.0, connection_bytes=85e6, requests_per_second=5_500, error_fraction=1e-4)

# aws.amazon.com/s3/pricing, S3 Standard.
GET_DOLLARS = 0.0004 / 1_000
PUT_DOLLARS = 0.005 / 1_000
STORED_DOLLARS = 0.023  # per GB and month
MONTH_HOURS = 730.0

# c6id of Amazon EC2: 2 to 128 virtual cores with a local NVMe disk, aws.amazon.com/ec2/instance-types/c6i. Networks and disks
# grow with the cores: c6id.32xlarge has 50 Gbit/s and 7,600 GB, and the smaller sizes have as much for each core at any time.
CORE_DOLLARS = 0.0504  # an hour
CORE_NETWORK_BYTES = 50e9 / 8 / 128  # a second
CORE_DISK_BYTES = 7_600e9 / 128
CORE_MEMORY_BYTES = 2 << 30
SIZES = (2, 4, 8, 16, 32, 64, 128)  # cores

# "The Llama 3 Herd of Models" (2024), table 5: 419 unexpected interruptions in 54 days of 16,384 GPUs, in machines of 8.
DEATHS_PER_MACHINE_DAY = 419 / 54 / (16_384 / 8)

# Assumption: a dense model of 8 billion parameters on an H100 at 40 % of 989 Tflop/s, 6 flops per parameter and token.
TOKENS_PER_SECOND = 0.4 * 989e12 / (6 * 8e9)
RUN_TOKENS = 1e13
