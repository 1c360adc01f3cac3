#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" mixtral_8x22b "$@"
