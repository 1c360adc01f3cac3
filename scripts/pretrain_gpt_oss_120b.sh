#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" gpt_oss_120b "$@"
