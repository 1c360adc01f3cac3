#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" olmoe_1b_7b "$@"
