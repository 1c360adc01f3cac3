#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" kimi_k2 "$@"
