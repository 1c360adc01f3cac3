#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" qwen3_235b_a22b "$@"
