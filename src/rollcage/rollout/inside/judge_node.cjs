// Loaded by `node --test` of a plain verifier: code under test that ends the process of its tests has not passed.
const WORK = [];
const isWork = (path) => WORK.some((folder) => path.includes(`${folder}/`));
const plain = process.reallyExit;
process.reallyExit = function (code) {
  if (!code && process.env.NODE_TEST_CONTEXT && !isWork(process.argv[1] || "") && isWork(new Error().stack)) {
    process._rawDebug("rollcage: code under test ended the process of its tests");
    code = 1;
  }
  return plain.call(process, code);
};
