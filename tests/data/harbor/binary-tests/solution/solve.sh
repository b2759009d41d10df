#!/bin/bash
set -e
cp /solution/blob.bin copy
