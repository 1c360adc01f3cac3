#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" moonlight_16b_a3b "$@"
