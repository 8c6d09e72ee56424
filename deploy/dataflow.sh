#!/bin/bash
# Builds shards on Dataflow, from text in a bucket to the bucket. Run it in the image `dataflow` of
# deploy/Dockerfile, so that this process and the workers have the same versions:
#
#     docker run --rm --volume "$PWD:/work" --workdir /work --entrypoint bash IMAGE deploy/dataflow.sh
set -euo pipefail
options="--runner=DataflowRunner --project=PROJECT --region=REGION --temp_location=gs://BUCKET/temp"
options+=" --sdk_container_image=IMAGE --sdk_location=container --experiments=use_runner_v2 --max_num_workers=100"

bert-jax build-examples --input 'gs://BUCKET/text/*.zst' --tokenizer vocab.txt --output gs://BUCKET/wiki_128 \
    --seq_len 128 --engine beam --engine_options "$options"
