#!/bin/bash
# Runs a command on a TPU VM again and again, until it is done or fails by a mistake:
#
#     bash tpu_vm.sh COMMAND ...
#
# It starts the command again after exit code 75 (a process was lost) or a signal, and up to MAX_FAILURES (10) times
# after other codes, but not after 0 and 2. SIGTERM and SIGINT to this script reach the command and end the loop.
pause=${PAUSE:-20} # seconds; hosts of a slice start within minutes of each other
left=${MAX_FAILURES:-10}
ended=

trap 'ended=yes; kill -TERM "$child" 2> /dev/null' TERM INT
while true; do
    "$@" &
    child=$!
    wait "$child"
    code=$?
    # A signal to this script interrupts the wait, while the command saves.
    while kill -0 "$child" 2> /dev/null; do
        wait "$child"
        code=$?
    done
    if [ -n "$ended" ] || [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then
        exit "$code"
    elif [ "$code" -ne 75 ] && [ "$code" -lt 129 ]; then
        left=$((left - 1))
        [ "$left" -ge 0 ] || exit "$code"
    fi
    echo "tpu_vm.sh: exit code $code; starts again in $pause s" >&2
    sleep "$pause" &
    wait $!
    [ -z "$ended" ] || exit "$code"
done
