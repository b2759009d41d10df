#!/bin/bash
set -e
mkdir done
