#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" transformer_xl_moe "$@"
