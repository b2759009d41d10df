#!/bin/bash
set -e
echo x > a; printf "x\ny\n" > b
