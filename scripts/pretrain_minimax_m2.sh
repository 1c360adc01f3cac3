#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" minimax_m2 "$@"
