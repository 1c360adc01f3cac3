#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" ct_moe_16 "$@"
