#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" qwen3_30b_a3b "$@"
