#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" moe_gpt_m "$@"
