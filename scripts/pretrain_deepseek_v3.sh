#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" deepseek_v3 "$@"
