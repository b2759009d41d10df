#!/bin/bash
set -e
touch x
