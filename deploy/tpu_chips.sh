#!/bin/bash
# Runs many single-chip commands on one TPU host, one process on each chip at a time:
#
#     bash deploy/tpu_chips.sh COMMANDS [CHIPS]
#
# COMMANDS is a file with a command on each line. A chip that is free takes the next one. The exit code is 123 if any
# command failed, and each that failed is printed.
chips=${2:-$(find /dev -path '/dev/accel[0-9]*' -o -path '/dev/vfio/[0-9]*' 2> /dev/null | wc -l)}
if [ "$chips" -eq 0 ]; then
    echo "error: no TPU chip in /dev; give the number of chips after the file" >&2
    exit 2
fi

run_on_chip() {
    # libtpu's variables for a process that is alone on one chip, with a port of its own.
    export TPU_VISIBLE_CHIPS=$CHIP TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 TPU_PROCESS_BOUNDS=1,1,1
    export TPU_PROCESS_PORT=$((8476 + CHIP)) TPU_PROCESS_ADDRESSES=localhost:$((8476 + CHIP)) CLOUD_TPU_TASK_ID=0
    # Without it, every process would start a coordinator of its own at the same port.
    export JAX_NUM_PROCESSES=1
    bash -c "$1"
    code=$?
    [ "$code" -eq 0 ] || echo "chip $CHIP: exit code $code: $1" >&2
    return "$code"
}
export -f run_on_chip
exec xargs --arg-file="$1" --delimiter='\n' --max-args=1 --max-procs="$chips" --process-slot-var=CHIP \
    bash -c 'run_on_chip "$1" || exit 1' run
