#!/bin/bash
[ -e "$TEST_DIR/need" ] && [ -e /app/old ]
