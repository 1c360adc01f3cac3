#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" gpt2_moe "$@"
