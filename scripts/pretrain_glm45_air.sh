#!/usr/bin/env bash
exec "$(dirname "$0")/pretrain.sh" glm45_air "$@"
