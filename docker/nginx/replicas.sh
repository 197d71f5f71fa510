#!/bin/sh
# Runs nginx with penstock.conf for the replicas of docker-compose.yml.
set -eu
sed "s/server penstock-0.penstock:8000 \(.*\);/server replica-1:8000 \1;/
    s/server penstock-1.penstock:8000 \(.*\);/server replica-2:8000 \1; server replica-3:8000 \1;/
    s/max_size=200g/max_size=1g/" /etc/penstock/penstock.conf >/tmp/penstock.conf
exec nginx -c /etc/penstock/nginx.conf
