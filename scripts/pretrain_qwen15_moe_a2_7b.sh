#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" qwen15_moe_a2_7b "$@"
